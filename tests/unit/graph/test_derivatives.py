"""Derivatives of single operations against finite differences, and what they hold against what is planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from snows.graph import derivatives
from snows.graph.chain import Chain, Linearization
from snows.graph.cost import held_bytes
from snows.graph.derivatives import has_rule, is_factor
from snows.graph.operators import OPERATORS, Derivative, Holds, operator_of
from tests.graphs import CASES, OTHER, SAMPLES, Builder, Case, Held, X, made, random

aten = torch.ops.aten
BY_RULE = [name for name, row in OPERATORS.items() if row.derivative is not Derivative.AUTOGRAD]
FIXED_TENSOR = {"index_select"}  # its index: the rule of linear maps does not hold
SCALE = random(4, 1, 1, seed=3)

# Calls for which the rule of the row does not hold.
BEYOND_THE_RULE: dict[str, Case] = {
    "added with a factor": Case(aten.add.Tensor, (X, OTHER), {"alpha": 0.5}),
    "a factor for what varies": Case(aten.add.Tensor, (OTHER, X), {"alpha": 0.5}),
    "added to itself": Case(aten.add.Tensor, (X, X)),
    "added to something larger": Case(aten.add.Tensor, (X, OTHER), shape=(4, 1, 1)),
    "a product with itself": Case(aten.mul.Tensor, (X, X)),
    "a product with something larger": Case(aten.mul.Tensor, (OTHER, X), shape=(4, 1, 1)),
    "the shift varies": Case(aten.addcmul.default, (X, OTHER, SCALE)),
    "scale and input are one value": Case(aten.addcmul.default, (SCALE, X, X)),
    "a scaled product": Case(aten.addcmul.default, (SCALE, X, SCALE), {"value": 2.0}),
    "the scale varies": Case(aten.addcmul.default, (SCALE, OTHER, X)),
    "bounds are tensors": Case(aten.clamp.Tensor, (X, SCALE - 1, SCALE + 1)),
    "the bias varies": Case(aten.linear.default, (random(7, 6), random(5, 6), X), shape=(5,)),
    "joined with something fixed": Case(aten.cat.default, ([X, OTHER], 1)),
    "input and weight are one value": Case(aten.linear.default, (X, X), shape=(6, 6)),
}

# And for which it does.
WITHIN_THE_RULE: dict[str, Case] = {
    "the weight of a convolution": Case(
        aten.conv2d.default, (OTHER, X, random(6), [2, 2], [1, 1], [1, 1], 2), shape=(6, 2, 3, 3)
    ),
    "options by name": Case(aten.conv2d.default, (X, random(6, 4, 3, 3)), {"padding": [1, 1], "bias": random(6)}),
    "the weight of a linear operation": Case(aten.linear.default, (OTHER, X, random(5)), shape=(5, 6)),
    "the second term": Case(aten.add.Tensor, (OTHER, X)),
    "a number is added": Case(aten.add.Tensor, (X, 2.0)),
    "the second factor": Case(aten.mul.Tensor, (SCALE, X)),
    "a number in front": Case(aten.mul.Tensor, (X, 2.5)),
    "a scalar product": Case(aten.mul.Scalar, (X, 2.5)),
    "split": Case(aten.split.Tensor, (X, 2, 1)),
}


def chain_of(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Chain, Held, int]:
    """The value and derivative of one call, what it holds, and the bytes that are planned for it."""
    builder, x, y = made(case)
    builder.build()
    known: dict[Node, Any] = {x: case.x, **{node: builder.parameters[name] for node, name in builder.names.items()}}
    linearization = Linearization(builder.nodes, [x], [y])
    with Held() as held:
        (value,), chain = linearization.at(known, dtype)
        chain.push([torch.zeros_like(case.x)])
    planned = SAMPLES * sum(held_bytes(node, {x, *builder.nodes}) for node in builder.nodes)
    return value, chain, held, planned


@pytest.mark.parametrize("name", [*CASES, *BEYOND_THE_RULE, *WITHIN_THE_RULE])
def test_derivatives_against_finite_differences(name: str) -> None:
    case = {**CASES, **BEYOND_THE_RULE, **WITHIN_THE_RULE}[name]
    value, chain, _, _ = chain_of(case)
    v, u, step = random(*case.shape, seed=9), random(*value.shape, seed=3), 1e-6
    torch.testing.assert_close(value, case.run(case.x), rtol=0, atol=0)
    (pushed,) = chain.push([v])
    expected = (case.run(case.x + step * v) - case.run(case.x - step * v)) / (2 * step)
    torch.testing.assert_close(pushed, expected, rtol=1e-6, atol=1e-7)
    (pulled,) = chain.pull([u], [0.7])  # the adjoint of what is pushed
    torch.testing.assert_close((pulled * v).sum(), 0.7 * (u * pushed).sum())


def rule_holds(case: Case) -> bool:
    builder, x, _ = made(case)
    return has_rule(builder.nodes[0], (x,))


@pytest.mark.parametrize("name", CASES)
def test_the_rule_of_the_row_is_used(name: str) -> None:
    assert rule_holds(CASES[name]) == (name in [*BY_RULE, "getitem"] and name not in FIXED_TENSOR)


@pytest.mark.parametrize("name", [*BEYOND_THE_RULE, *WITHIN_THE_RULE])
def test_rules_know_where_they_hold(name: str) -> None:
    case = {**BEYOND_THE_RULE, **WITHIN_THE_RULE}[name]
    assert rule_holds(case) == (name in WITHIN_THE_RULE)


def test_two_values_that_vary() -> None:
    builder = Builder()
    x, y = builder.input(OTHER), builder.input(OTHER + 1)
    total, product = builder.call(aten.add.Tensor, x, y), builder.call(aten.mul.Tensor, x, y)
    assert has_rule(total, (x, y))
    assert not has_rule(product, (x, y))
    assert has_rule(builder.call(aten.cat.default, [x, y], 1), (x, y))


def test_every_kind_in_the_table_has_its_rule() -> None:
    assert derivatives._RULES.keys() == set(Derivative) - {Derivative.AUTOGRAD}


FACTORS = (Derivative.SCALE, Derivative.SCALE_AND_SHIFT, Derivative.RELU, Derivative.ELEMENTWISE)


@pytest.mark.parametrize("name", CASES)
def test_factors(name: str) -> None:
    """A node is a factor exactly if its Jacobian is diagonal by its rule."""
    builder, x, _ = made(CASES[name])
    node = builder.nodes[0]
    assert is_factor(node, (x,)) == (operator_of(node).derivative in FACTORS)
    assert not is_factor(node, ())
    assert not is_factor(node, (x, x))


@pytest.mark.parametrize("name", BEYOND_THE_RULE)
def test_no_factors(name: str) -> None:
    builder, x, _ = made(BEYOND_THE_RULE[name])
    assert not is_factor(builder.nodes[0], (x,))


# What is held: autograd counts its own

A_FEW_BYTES = 64  # a single number expanded to the size of a value
MORE_THAN_PLANNED = {  # by autograd, for second derivatives; within this factor
    "bilinear": 1.1, "scaled_dot_product_attention": 1.1, "amax": 1.1, "rms_norm": 1.4, "rsqrt": 1.3, "reciprocal": 1.3,
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_no_more_is_held_than_planned(name: str) -> None:
    _, chain, held, planned = chain_of(CASES[name])
    assert held.bytes(chain, SAMPLES) <= planned * MORE_THAN_PLANNED.get(name, 1) + A_FEW_BYTES


@pytest.mark.parametrize("name", ["added to itself", "a product with itself", "a number is added", "split"])
def test_no_more_is_held_than_planned_within_and_beyond_the_rules(name: str) -> None:
    _, chain, held, planned = chain_of({**BEYOND_THE_RULE, **WITHIN_THE_RULE}[name])
    assert held.bytes(chain, SAMPLES) <= planned + A_FEW_BYTES


@pytest.mark.parametrize("name", [name for name in BY_RULE if OPERATORS[name].holds is Holds.SLOPES])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_activations_hold_one_slope_for_each_element(name: str, dtype: torch.dtype) -> None:
    _, chain, held, planned = chain_of(CASES[name], dtype)
    assert planned == OTHER.nbytes
    assert held.bytes(chain, SAMPLES) == planned * dtype.itemsize // 8


@pytest.mark.parametrize(
    "name", [name for name in BY_RULE if OPERATORS[name].holds is Holds.NOTHING and name not in FIXED_TENSOR]
)
def test_linear_maps_hold_nothing(name: str) -> None:
    _, chain, held, planned = chain_of(CASES[name])
    assert planned == 0
    assert held.bytes(chain, SAMPLES) <= A_FEW_BYTES


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_map_is_held_in_its_dtype(dtype: torch.dtype) -> None:
    _, chain, held, _ = chain_of(CASES["addcmul"], dtype)
    (pushed,) = chain.push([OTHER])
    assert pushed.dtype == dtype
    assert chain.pull([OTHER], [1.0])[0].dtype == dtype
    assert held.bytes(chain, 4) == 4 * dtype.itemsize  # one scale for each channel


def gate(dtype: torch.dtype) -> tuple[int, int]:
    """Bytes held by a product of two varying values, and the bytes planned for it."""
    builder = Builder()
    x = builder.input(OTHER)
    squeezed = builder.call(aten.neg.default, x)
    builder.call(aten.mul.Tensor, x, squeezed)
    builder.build()
    with Held() as held:
        _, chain = Linearization(builder.nodes, [x], [builder.nodes[-1]]).at({x: OTHER}, dtype)
        chain.push([OTHER])
    return held.bytes(chain, SAMPLES), SAMPLES * held_bytes(builder.nodes[-1], {x, squeezed})


def test_a_gate_holds_both_of_its_inputs() -> None:
    held, planned = gate(torch.float64)
    assert held >= 2 * OTHER.nbytes
    assert planned >= held - 2 * OTHER.nbytes  # those of the negation
    assert planned >= 2 * 2 * OTHER.nbytes


def test_a_fixed_factor_of_each_sample_is_held() -> None:
    builder = Builder()
    x, fixed = builder.input(OTHER), builder.input(OTHER + 1)
    product = builder.call(aten.mul.Tensor, x, fixed)
    builder.build()
    assert SAMPLES * held_bytes(product, {x}) == OTHER.nbytes


def test_what_does_not_vary_holds_nothing() -> None:
    builder = Builder()
    x = builder.input(OTHER)
    comparison = builder.call(aten.gt.Scalar, x, 0)
    size = builder.call(aten.sym_size.int, x, 1)
    several = builder.call(aten.max_pool2d_with_indices.default, x, [2, 2])
    builder.build()
    assert [held_bytes(node, {x}) for node in (comparison, size, several)] == [0, 0, 0]


def test_a_layer_holds_its_input_where_its_weight_varies() -> None:
    builder = Builder()
    x = builder.input(OTHER)
    layer = builder.call(aten.conv2d.default, x, random(6, 4, 3, 3), random(6))
    builder.build()
    _, weight, bias = layer.all_input_nodes
    assert SAMPLES * held_bytes(layer, {weight}) == OTHER.nbytes
    assert held_bytes(layer, {x}) == 0
    everything = SAMPLES * held_bytes(layer, {bias})  # no rule: by autograd
    assert everything == 2 * layer.meta["val"].nbytes
