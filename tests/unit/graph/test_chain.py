"""Chains of linear maps against forward- and reverse-mode derivatives of the eager model, in float64."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp

from snows.graph import Graph, capture
from snows.graph.chain import Chain, Linearization, Step
from tests.graphs import SAMPLES, Builder, Held, random
from tests.networks import NETWORKS, call_arguments, captured, example

aten = torch.ops.aten
LINKS: dict[str, Callable[[Tensor], Tensor]] = {  # what comes between a convolution and the output
    "relu": torch.relu,
    "two factors in a row": lambda x: torch.relu(3 * x),
    "a factor that is read twice": lambda x: (y := 3 * x) + torch.relu(y),
    "a value with itself": lambda x: x * x + (x + x),
    "a fixed tensor": lambda x: x * torch.arange(1.0, 5.0, dtype=x.dtype)[:, None, None] + 1,
    "a number in front": lambda x: 2.5 * x - x / 3,
    "broadcast": lambda x: x + x.mean((2, 3), keepdim=True) * x[:, :1],
    "added with a factor": lambda x: torch.add(x, x.flip(1), alpha=0.5),
    "split": lambda x: torch.cat([part * (i + 1) for i, part in enumerate(x.split(2, 1))], 1),
    "chunks, one unread": lambda x: x.chunk(2, 1)[1],
    "with something fixed": lambda x: torch.cat([x, torch.ones_like(x)], 1),
    "shapes": lambda x: x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, 2).transpose(1, 2).flatten(1),
    "pools": lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2) + F.adaptive_avg_pool2d(x, 2),
    "pad and upsample": lambda x: F.interpolate(F.pad(x, (1, 0, 0, 1)), scale_factor=2.0),
    "smooth": lambda x: F.silu(x) + F.gelu(x) * torch.sigmoid(x) + F.hardswish(x) + F.elu(x),
    "pieces": lambda x: F.relu6(4 * x) + F.hardtanh(x) + F.leaky_relu(x, 0.2) + x.clamp(-0.3, 0.4),
    "gated": lambda x: F.glu(x, 1),
    "norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "softmax": lambda x: F.softmax(x.flatten(2), -1) @ x.flatten(2).mT,
    "linear": lambda x: F.linear(x, torch.arange(12.0, dtype=x.dtype).view(3, 4) / 12),
    "several values, one of them by autograd": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "a comparison": lambda x: torch.where(x > 0, x, x.square()),
}


class Link(nn.Module):
    def __init__(self, link: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.link = link

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.link(self.norm(self.conv(x))))


def linearized(graph: Graph, x: Any, parameter: str, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Chain]:
    """The whole network's outputs, as they vary with one parameter."""
    layer = next(layer for layer in graph.layers if layer.parameter == parameter)
    values = dict(zip((node.name for node in graph.inputs), torch.utils._pytree.tree_leaves(x), strict=True))
    segment = graph.segment([layer], 1000)
    values |= graph.program(0, layer.position)(values, graph.parameters)
    values |= segment.prelude(values, graph.parameters)
    return segment.body.linearize(values, graph.parameters, [parameter], dtype)


@pytest.mark.parametrize("name", LINKS)
def test_every_kind_of_node(name: str) -> None:
    torch.manual_seed(0)
    model = Link(LINKS[name]).double().eval()
    x, weight = torch.randn(3, 2, 4, 4, dtype=torch.float64), model.conv.weight.detach()
    graph = capture(model, (x,), {})
    outputs, chain = linearized(graph, x, "conv.weight")
    silent = [0.0] * (len(outputs) - 1)  # factors of the operations before the last

    def forward(w: Tensor) -> Tensor:
        result: Tensor = functional_call(model, {"conv.weight": w}, (x,))
        return result

    v = torch.randn_like(weight)
    expected, tangent = jvp(forward, (weight,), (v,))
    torch.testing.assert_close(outputs[-1], expected)
    torch.testing.assert_close(chain.push([v])[-1], tangent)
    u = torch.randn_like(expected)
    (pulled,) = chain.pull([*outputs[:-1], u], [*silent, 0.7])
    torch.testing.assert_close(pulled, vjp(forward, weight)[1](0.7 * u)[0])


def test_derivatives_pass_through_detached_values() -> None:
    """The output depends on them. (Autograd's own answer for the eager model is zero.)"""
    torch.manual_seed(0)
    model = Link(lambda x: F.silu(x.detach())).double().eval()
    x, weight = torch.randn(3, 2, 4, 4, dtype=torch.float64), model.conv.weight.detach()
    outputs, chain = linearized(capture(model, (x,), {}), x, "conv.weight")
    v, u, step = torch.randn_like(weight), torch.randn_like(outputs[-1]), 1e-6
    with torch.no_grad():
        ends = [functional_call(model, {"conv.weight": weight + sign * step * v}, (x,)) for sign in (1, -1)]
    pushed = chain.push([v])[-1]
    torch.testing.assert_close(pushed, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-7)
    (pulled,) = chain.pull([*outputs[:-1], u], [*[0.0] * (len(outputs) - 1), 1.0])
    torch.testing.assert_close((pulled * v).sum(), (u * pushed).sum())


def test_factors_in_a_row_are_one() -> None:
    """Batch norm and ReLU behind a convolution: one step for both."""
    _, graph = captured("residual")
    _, chain = linearized(graph, example("residual", 3), "conv1.weight")
    names = [step.name for step in chain._steps]
    assert not any("addcmul" in name for name in names[:2])
    assert sum("relu" in name for name in names) == sum("relu" in node.name for node in graph.nodes) - 1


@pytest.mark.parametrize("name", ["mlp", "conv-bn", "residual", "grouped", "depthwise", "conv1d", "conv3d"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_maps_hold_what_the_plan_says(name: str, dtype: torch.dtype) -> None:
    """And not the values they were taken at: slopes of activations and the layer's inputs, besides weights."""
    samples = 17  # a size that no weight has
    _, graph = captured(name)
    inputs = call_arguments(example(name, samples))
    for layer in graph.layers[:2]:
        with Held() as held:
            outputs, chain = linearized(graph, inputs, layer.parameter, dtype)
            chain.push([graph.parameters[layer.parameter]])
        del outputs
        planned = samples * graph.segment([layer], 1000).cost.slope_bytes
        size = held.bytes(chain, samples)
        if name == "conv-bn":  # its pooling is differentiated by autograd, in full precision
            assert size <= 1.01 * planned
        else:
            assert size * 8 / dtype.itemsize == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize("name", NETWORKS)
def test_no_more_is_held_than_planned(name: str) -> None:
    """Gates among them: a product of two values that vary holds both."""
    samples = 17
    _, graph = captured(name)
    for layer in (layer for layer in graph.layers if layer.refusal is None):
        with Held() as held:
            outputs, chain = linearized(graph, call_arguments(example(name, samples)), layer.parameter)
            chain.push([graph.parameters[layer.parameter]])
        del outputs
        assert held.bytes(chain, samples) <= 1.01 * samples * graph.segment([layer], 1000).cost.slope_bytes


@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_decided_once_and_done_for_any_number_of_samples(name: str) -> None:
    _, graph = captured(name)
    layer = next(layer for layer in graph.layers if layer.refusal is None)
    program = graph.segment([layer], 1000).body
    for samples in (2, 5):
        linearized(graph, call_arguments(example(name, samples)), layer.parameter)
    assert len(program._linearizations) == 1


# Chains and linearizations by themselves


def matrix_step(name: str, sources: tuple[str, ...], *matrices: Tensor) -> Step:
    def push(*tangents: Tensor) -> Tensor:
        return sum((m @ t for m, t in zip(matrices, tangents, strict=True)), torch.zeros(2, dtype=torch.float64))

    return Step(name, sources, push, lambda u: [m.T @ u for m in matrices])


A, B, C, D = (random(2, 2, seed=i) for i in range(4))


def diamond(outputs: list[str], dtype: torch.dtype = torch.float64) -> Chain:
    """x -> a -> b, and c from x and b."""
    steps = [
        matrix_step("a", ("x",), A), matrix_step("b", ("a",), B), matrix_step("c", ("x", "b"), C, D)
    ]  # fmt: skip
    return Chain(steps, ["x"], outputs, dtype)


@pytest.mark.parametrize("outputs", [["c"], ["a", "c"], ["c", "a", "b"], ["b"]])
def test_a_chain_is_the_product_of_its_steps(outputs: list[str]) -> None:
    chain = diamond(outputs)
    jacobians = {"a": A, "b": B @ A, "c": C + D @ B @ A}
    v = random(2, seed=5)
    for value, name in zip(chain.push([v]), outputs, strict=True):
        torch.testing.assert_close(value, jacobians[name] @ v)
    u = [random(2, seed=6 + i) for i in range(len(outputs))]
    factors = [0.5, 2.0, -1.0][: len(outputs)]
    expected = sum(
        (c * jacobians[name].T @ part for name, part, c in zip(outputs, u, factors, strict=True)), torch.zeros(2)
    )
    torch.testing.assert_close(chain.pull(u, factors)[0], expected)


def test_a_chain_frees_tangents_that_nothing_reads_again() -> None:
    alive: list[int] = []
    seen: list[weakref.ref[Tensor]] = []

    def step(name: str, source: str) -> Step:
        def push(t: Tensor) -> Tensor:
            alive.append(sum(reference() is not None for reference in seen))
            seen.append(weakref.ref(result := 2 * t))
            return result

        return Step(name, (source,), push, lambda u: [2 * u])

    chain = Chain([step("a", "x"), step("b", "a"), step("c", "b"), step("d", "c")], ["x"], ["b", "d"], torch.float64)
    assert [value.tolist() for value in chain.push([torch.ones(1)])] == [[4], [16]]
    assert alive == [0, 1, 1, 2]  # "a" is gone when "c" is made; "b" stays, it is an output


def test_tangents_are_taken_in_the_chains_dtype() -> None:
    chain = Chain([Step("a", ("x",), lambda t: 2 * t, lambda u: [2 * u])], ["x"], ["a"], torch.bfloat16)
    assert chain.push([torch.ones(1)])[0].dtype == torch.bfloat16
    assert chain.pull([torch.ones(1)], [0.5])[0].dtype == torch.bfloat16


def factors_in_a_row(*extra: str) -> list[str]:
    """The steps of x -> 2x -> relu -> 3x; `extra`: other things that read the nodes between them."""
    builder = Builder()
    x = builder.input(random(SAMPLES, 4))
    double = builder.call(aten.mul.Tensor, x, 2.0)
    relu = builder.call(aten.relu.default, double)
    triple = builder.call(aten.mul.Tensor, relu, 3.0)
    outputs = [triple]
    if "read" in extra:
        outputs.append(builder.call(aten.neg.default, double))
    if "output" in extra:
        outputs.append(relu)
    builder.build(*outputs)
    value = random(SAMPLES, 4, seed=2)
    (_, *_), chain = Linearization(builder.nodes, [x], outputs).at({x: value}, torch.float64)
    slope = 6.0 * (value > 0).double()
    torch.testing.assert_close(chain.push([torch.ones_like(value)])[0], slope)
    rest = [torch.zeros_like(value) for _ in outputs[1:]]
    torch.testing.assert_close(chain.pull([torch.ones_like(value), *rest], [1.0] * len(outputs))[0], slope)
    return [step.name for step in chain._steps]


def test_factors_that_only_the_next_one_reads_are_merged() -> None:
    assert factors_in_a_row() == ["mul_tensor_1"]
    assert factors_in_a_row("read") == ["mul_tensor", "mul_tensor_1", "neg_default"]
    assert factors_in_a_row("output") == ["relu_default", "mul_tensor_1"]


def test_values_are_freed_after_their_last_reader() -> None:
    builder = Builder()
    x = builder.input(random(SAMPLES, 4))
    several = builder.call(aten.split.Tensor, builder.call(aten.neg.default, x), 2, 1)
    first = builder.call(operator.getitem, several, 0)
    second = builder.call(operator.getitem, several, 1)
    total = builder.call(aten.add.Tensor, first, second)
    builder.build()
    linearization = Linearization(builder.nodes, [x], [first, total])
    freed = {node.name: {each.name for each in entry.freed} for node, entry in linearization._entries.items()}
    neg = builder.nodes[0]
    assert freed == {
        neg.name: {x.name}, several.name: set(), first.name: set(), second.name: {several.name, neg.name},
        total.name: {second.name},  # the first is an output
    }  # fmt: skip


def test_what_does_not_vary_has_no_step() -> None:
    builder = Builder()
    x, fixed = builder.input(random(SAMPLES, 4)), builder.input(random(SAMPLES, 4))
    beside = builder.call(aten.tanh.default, fixed)
    positive = builder.call(aten.gt.Scalar, x, 0)
    picked = builder.call(aten.where.self, positive, x, beside)
    builder.build()
    known: dict[Any, Any] = {x: x.meta["val"], fixed: fixed.meta["val"]}
    (value,), chain = Linearization(builder.nodes, [x], [picked]).at(known, torch.float64)
    torch.testing.assert_close(value, picked.meta["val"])
    assert [step.name for step in chain._steps] == [picked.name]
    assert [step.sources for step in chain._steps] == [(x.name,)]
