"""Every row of the table of operators against what the operation does."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph as FxGraph
from torch.fx import Node
from torch.utils import _pytree as pytree

from snows.graph import capture
from snows.graph.channels import find_spaces
from snows.graph.operators import (
    OPERATORS,
    UNKNOWN,
    Channels,
    Derivative,
    Family,
    Holds,
    Linear,
    Memory,
    Operator,
    argument_of,
    is_attention,
    is_counted,
    is_layer,
    is_piecewise_linear,
    operator_of,
    out_of_place,
    returned_with_others,
    sizes_of,
    softmax_of,
)
from tests.graphs import CASES, NEVER_IN_A_GRAPH, OTHER, RECURRENT, Builder, X, made, random

aten = torch.ops.aten

# The paper: convolutions, linear layers, attention, activations, and the layer norms of transformers.
COUNTED = {
    *("conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding", "linear"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention"),
    *("relu", "relu6", "hardtanh", "leaky_relu", "clamp", "clamp_min", "threshold", "prelu", "glu"),
    *("gelu", "silu", "hardswish", "sigmoid", "tanh", "elu", "celu", "selu", "mish", "softplus", "log_sigmoid"),
    *("layer_norm", "rms_norm", "native_layer_norm"),
}
WITH_IN_PLACE_FORM = {
    "relu", "relu6", "hardtanh", "leaky_relu", "silu", "hardswish", "elu", "celu", "selu", "mish", "add",
}  # fmt: skip
LINEAR_IN_WHAT_NEVER_VARIES = {"embedding", "bilinear"}  # so the table need not say so
WITH_TWO_ARGUMENTS = [
    *("conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding", "linear", "bilinear"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "matmul", "bmm", "mm", "addmm", "baddbmm", "einsum"),
    *("mul", "addcmul", "div", "add", "sub", "rsub", "maximum", "minimum"),
]


PROBED = [name for name in CASES if name != "getitem"]  # that one is Python's
GIVING_VALUES_OF_THEIR_INPUT = (  # besides those that only change the shape
    *("upsample_nearest", "_upsample_nearest", "replication", "reflection", "max", "adaptive_max", "amax"),
    *("maximum", "embedding"),
)


def targets(name: str) -> list[Any]:
    packet = getattr(aten, name)
    return [getattr(packet, overload) for overload in packet.overloads()]


def test_every_row_names_an_operation_and_has_a_case() -> None:
    assert CASES.keys() == OPERATORS.keys() - NEVER_IN_A_GRAPH - RECURRENT
    for key in OPERATORS.keys() - {"getitem"}:
        name, _, overload = key.partition(".")
        assert targets(name)
        assert not overload or overload in getattr(aten, name).overloads()


@pytest.mark.parametrize("name", CASES)
def test_a_case_calls_the_operation_of_its_row(name: str) -> None:
    builder, _, _ = made(CASES[name])
    called = [operator_of(node) for node in builder.nodes]
    assert OPERATORS[name] is called[-1 if name == "getitem" else 0]


def test_an_operation_without_a_row_is_unknown() -> None:
    graph = FxGraph()
    x = graph.placeholder("x")
    for target in (aten.sin.default, aten.relu_.default, operator.add, operator.mul, torch.relu):
        assert operator_of(graph.call_function(target, (x,))) is UNKNOWN
    assert operator_of(x) is UNKNOWN
    with torch.library._scoped_library("house_of_tests", "FRAGMENT") as library:
        library.define("relu(Tensor x) -> Tensor")  # the name alone does not make it ATen's
        assert operator_of(graph.call_function(torch.ops.house_of_tests.relu.default, (x,))) is UNKNOWN


def test_the_default_row_takes_nothing_for_granted() -> None:
    assert Operator(
        family=Family.OTHER, counted=False, linear=Linear.NEVER, products=False, holds=Holds.EVERYTHING,
        derivative=Derivative.AUTOGRAD, channels=Channels.FIXED, window_axes=0, memory=Memory.UNKNOWN, in_place=False,
        shape_only=False,
    ) == UNKNOWN  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_counted_are_the_operations_of_the_paper(name: str) -> None:
    assert OPERATORS[name].counted == (name in COUNTED)


def is_bent(name: str, at: tuple[Tensor, ...], along: tuple[Tensor, ...], step: float = 1e-4) -> bool:
    """Whether second differences of most outputs are not zero. At kinks they may be: few outputs are near one."""
    builder, _, _ = made(CASES[name])
    (node, *_) = builder.nodes

    def value(h: float) -> Tensor:
        moved = [a + h * b for a, b in zip(at, along, strict=True)]
        found = builder.value(node, dict(zip(float_arguments(node)[: len(at)], moved, strict=True)))
        first = found if isinstance(found, Tensor) else found[0]
        return first.flatten()

    second = (value(step) - 2 * value(0) + value(-step)).abs()
    return float((second > 1e-12).double().mean()) > 0.1


def float_arguments(node: Node) -> list[Node]:
    """The varying one first."""
    values = [a for a in node.all_input_nodes if a.meta["val"].is_floating_point()]
    return sorted(values, key=lambda a: not a.name.startswith("x"))


@pytest.mark.parametrize("name", PROBED)
def test_linear_against_second_differences(name: str) -> None:
    case, linear = CASES[name], OPERATORS[name].linear
    bent = is_bent(name, (case.x,), (random(*case.shape, seed=7),))
    assert bent == (linear is Linear.NEVER and name not in LINEAR_IN_WHAT_NEVER_VARIES)


@pytest.mark.parametrize("name", WITH_TWO_ARGUMENTS)
def test_linear_against_second_differences_of_all_arguments(name: str) -> None:
    (node, *_) = made(CASES[name])[0].nodes
    at = [argument.meta["val"] for argument in float_arguments(node)]
    together = is_bent(name, tuple(at), tuple(random(*value.shape, seed=8) for value in at))
    assert together == (OPERATORS[name].linear is not Linear.ALWAYS)


@pytest.mark.parametrize("name", PROBED)
def test_is_piecewise_linear_counts_what_varies(name: str) -> None:
    (node, *_) = made(CASES[name])[0].nodes
    values = float_arguments(node)
    linear = OPERATORS[name].linear
    assert is_piecewise_linear(node, {values[0]}) == (linear is not Linear.NEVER)
    if len(values) > 1:
        assert is_piecewise_linear(node, set(values)) == (linear is Linear.ALWAYS)


def test_products_and_quotients_of_a_value_with_itself() -> None:
    builder = Builder()
    x, y = builder.input(OTHER), builder.input(OTHER)
    square, quotient, inverse = (
        builder.call(aten.mul.Tensor, x, x), builder.call(aten.div.Tensor, x, x), builder.call(aten.div.Tensor, y, x)
    )  # fmt: skip
    assert not is_piecewise_linear(square, {x})
    assert is_piecewise_linear(square, {y})
    assert not is_piecewise_linear(quotient, {x})
    assert not is_piecewise_linear(inverse, {x})
    assert is_piecewise_linear(inverse, {y})
    assert not is_piecewise_linear(inverse, {x, y})


@pytest.mark.parametrize("name", PROBED)
def test_shape_only_operations_give_values_of_their_input(name: str) -> None:
    case = CASES[name]
    values = set(case.run(case.x).flatten().tolist())
    if OPERATORS[name].shape_only or not name.startswith(GIVING_VALUES_OF_THEIR_INPUT):
        assert (values <= set(case.x.flatten().tolist())) == OPERATORS[name].shape_only


@pytest.mark.parametrize("name", [name for name in PROBED if OPERATORS[name].memory is Memory.NEW])
def test_new_memory_is_never_the_inputs(name: str) -> None:
    x = CASES[name].x.abs()  # which activations pass unchanged
    assert CASES[name].run(x).untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_the_memory_of_results_is_known_for_what_plain_networks_are_made_of() -> None:
    known = {name for name, row in OPERATORS.items() if row.memory is Memory.NEW}
    activations = COUNTED - {"prelu", "glu", "layer_norm", "rms_norm", "native_layer_norm"}
    activations -= {"scaled_dot_product_attention", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
    pools = {f"{kind}_pool{n}d" for kind in ("avg", "max", "adaptive_avg") for n in (1, 2, 3)}
    assert known == activations | pools | {"batch_norm", "add", "mul", "mean", "cat"}
    assert {name for name, row in OPERATORS.items() if row.memory is Memory.SHARED} == {"flatten", "pad"}


@pytest.mark.parametrize("name", sorted(WITH_IN_PLACE_FORM))
def test_in_place_forms_give_the_same(name: str) -> None:
    case = CASES[name]
    x, expected = case.x, case.run(case.x)
    graph = FxGraph()
    for overload in getattr(aten, f"{name}_").overloads():
        node = graph.call_function(getattr(getattr(aten, f"{name}_"), overload), (graph.placeholder("x"),))
        assert out_of_place(node) is getattr(getattr(aten, name), overload)
    in_place = getattr(getattr(aten, f"{name}_"), case.target._overloadname)
    in_place(*pytree.tree_map(lambda a: x if a is X else a, case.args))
    torch.testing.assert_close(x, expected, rtol=0, atol=0)


def test_other_operations_have_no_in_place_form() -> None:
    graph = FxGraph()
    x = graph.placeholder("x")
    for target in (aten.relu.default, aten.mul_.Tensor, aten.sin_.default, aten.clamp_.default, operator.iadd):
        assert out_of_place(graph.call_function(target, (x,))) is None
    assert out_of_place(x) is None
    assert {name for name, row in OPERATORS.items() if row.in_place} == WITH_IN_PLACE_FORM


FAMILIES = {
    Family.CONVOLUTION: {"conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding"},
    Family.LINEAR: {"linear"},
    Family.TRANSPOSED_CONVOLUTION: {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"},
    Family.ATTENTION: {"scaled_dot_product_attention"},
    Family.PRODUCT: {"matmul", "bmm", "mm", "addmm", "baddbmm", "einsum"},
    Family.BILINEAR: {"bilinear"},
    Family.RECURRENT: RECURRENT,
    Family.SOFTMAX: {"softmax", "_softmax", "_safe_softmax"},
    Family.EMBEDDING: {"embedding"},
    Family.ADDITION: {"add"},
}


@pytest.mark.parametrize("name", OPERATORS)
def test_families(name: str) -> None:
    family = next((family for family, names in FAMILIES.items() if name in names), Family.OTHER)
    assert OPERATORS[name].family is family


def test_layers_are_convolutions_and_linear_operations() -> None:
    found = {name for name in CASES if is_layer(made(CASES[name])[0].nodes[0])}
    assert found == FAMILIES[Family.CONVOLUTION] | FAMILIES[Family.LINEAR]


def written_out(reshapes: bool, softmax: bool) -> tuple[Node, Node]:
    """Attention as a product of scores and values, and the scores."""
    builder = Builder()
    scores, values = builder.input(random(11, 4, 6, 6)), builder.input(random(11, 4, 6, 5))
    if softmax:
        scores = builder.call(aten.softmax.int, scores, -1)
    between = scores
    if reshapes:
        between = builder.call(aten.reshape.default, builder.call(aten.clone.default, scores), [11, 4, 6, 6])
    return builder.call(aten.matmul.default, between, values), scores


@pytest.mark.parametrize("reshapes", [False, True])
def test_attention_that_is_written_out(reshapes: bool) -> None:
    product, scores = written_out(reshapes, softmax=True)
    assert softmax_of(product) is scores
    assert is_attention(product)
    assert is_counted(product)
    assert not is_attention(scores)
    assert not is_counted(scores)
    plain, _ = written_out(reshapes, softmax=False)
    assert softmax_of(plain) is None
    assert not is_attention(plain)
    assert not is_counted(plain)


def test_softmax_is_not_seen_through_arithmetic() -> None:
    builder = Builder()
    scores = builder.call(aten.softmax.int, builder.input(random(11, 6, 6)), -1)
    doubled = builder.call(aten.mul.Tensor, scores, 2.0)
    assert softmax_of(builder.call(aten.matmul.default, doubled, builder.input(random(11, 6, 5)))) is None
    assert softmax_of(builder.call(aten.add.Tensor, scores, scores)) is None


def test_fused_attention_is_attention() -> None:
    node = made(CASES["scaled_dot_product_attention"])[2]
    assert is_attention(node)
    assert is_counted(node)
    assert softmax_of(node) is None


def test_arguments_by_position_and_by_name() -> None:
    graph = FxGraph()
    node = graph.call_function(aten.conv2d.default, (1, 2), {"stride": [3]})
    assert argument_of(node, 1, "weight") == 2
    assert argument_of(node, 3, "stride", [1]) == [3]
    assert argument_of(node, 5, "dilation", [1]) == [1]
    assert argument_of(node, 2) is None


def test_one_of_several_values() -> None:
    builder = Builder()
    x = builder.input(OTHER)
    several = builder.call(aten.split.Tensor, x, 2, 1)
    one = builder.call(operator.getitem, several, 1)
    assert returned_with_others(one) is several
    assert returned_with_others(several) is None
    assert returned_with_others(builder.call(operator.getitem, x, 1)) is None
    assert sizes_of(one) == [11, 2, 6, 6]
    assert sizes_of(several) == []


# A new operation is one new row


class WithNewOperation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sin(self.first(x)))


NEW_ROW = Operator(
    counted=True, holds=Holds.SLOPES, derivative=Derivative.ELEMENTWISE, channels=Channels.SAME, memory=Memory.NEW
)


def test_a_new_operation_needs_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = WithNewOperation().double().eval()
    x, state = random(5, 2, 3, 3), dict(model.state_dict())

    before = capture(model, (x,), {})
    assert [node.name for node in before.operations] == ["conv2d", "conv2d_1"]
    assert [p for space in find_spaces(before, state) for p in space] == []

    monkeypatch.setitem(OPERATORS, "sin", NEW_ROW)
    graph = capture(model, (x,), {})
    assert [node.name for node in graph.operations] == ["conv2d", "sin", "conv2d_1"]
    (space,) = find_spaces(graph, state)
    assert sorted(space) == [("first.bias", 0), ("first.weight", 0), ("last.weight", 1)]

    layer = graph.layers[0]
    segment = graph.segment([layer], 2)
    weight = graph.parameters[layer.parameter]
    outputs, chain = segment.body.linearize({graph.inputs[0].name: x}, graph.parameters, [layer.parameter], x.dtype)

    def eager(w: Tensor) -> Tensor:
        return F.conv2d(torch.sin(F.conv2d(x, w, model.first.bias)), model.last.weight, model.last.bias)

    v, u = random(*weight.shape, seed=1), random(5, 3, 3, 3, seed=2)
    torch.testing.assert_close(outputs[-1], eager(weight))
    torch.testing.assert_close(chain.push([v])[-1], torch.autograd.functional.jvp(eager, weight, v)[1])
    silent = [torch.zeros_like(output) for output in outputs[:-1]]
    (pulled,) = chain.pull([*silent, u], [1.0, 1.0, 1.0])
    torch.testing.assert_close(pulled, torch.autograd.functional.vjp(eager, weight, u)[1])
