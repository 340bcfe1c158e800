"""Programs as pure functions, and where samples are in a tensor."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from snows.graph.convolution import convolution
from snows.graph.segment import Program, SampleLayout, noticing_interrupts
from tests.graphs import SAMPLES, Builder, random
from tests.networks import captured, example

aten = torch.ops.aten


def small() -> tuple[Builder, Program]:
    """y = relu(conv(x)) + shift, of which the convolution is outside."""
    builder = Builder()
    x = builder.input(random(SAMPLES, 2, 4, 4))
    layer = builder.call(aten.conv2d.default, x, builder.parameter(random(3, 2, 1, 1), "weight"))
    builder.call(aten.relu.default, layer)
    builder.call(aten.add.Tensor, builder.nodes[1], builder.parameter(random(3, 1, 1), "shift"))
    builder.build()
    nodes = builder.nodes[1:]
    return builder, Program(nodes, [nodes[1], nodes[0], nodes[1], builder.nodes[0]], builder.names)


def test_a_program_says_what_it_reads_and_gives() -> None:
    builder, program = small()
    layer, relu, add = builder.nodes
    assert program.reads == (layer.name,)
    assert program.parameters == ("shift",)
    assert program.gives == (add.name, relu.name)  # each once, and nothing that is not computed inside
    value = random(SAMPLES, 3, 4, 4, seed=3)
    found = program({layer.name: value, "more": None}, {"shift": torch.ones(1), "more": torch.ones(1)})
    assert list(found) == [add.name, relu.name]
    torch.testing.assert_close(found[add.name], value.relu() + 1)


def test_a_program_without_nodes_gives_nothing() -> None:
    _, graph = captured("mlp")
    program = graph.program(2, 2)
    assert (program.reads, program.parameters, program.gives) == ((), (), ())
    assert program({}, {}) == {}


def test_ctrl_c_is_noticed_between_the_operations_of_a_backward_pass() -> None:
    """A backward pass is one native call, which does not look for signals by itself."""
    weight = torch.randn(500, 500) / 22
    x = torch.ones(500, 500, requires_grad=True)

    def seconds(interrupt_after: float) -> float:
        y = x
        for _ in range(100):
            y = noticing_interrupts(y @ weight)
        total = y.sum()
        began = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, interrupt_after)
        with suppress(KeyboardInterrupt):
            total.backward()  # type: ignore[no-untyped-call]
        signal.setitimer(signal.ITIMER_REAL, 0)
        return time.monotonic() - began

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)  # a timer that presses Ctrl-C
    try:
        whole = min(seconds(60), seconds(60))
        assert seconds(whole / 10) < 0.7 * whole
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("first_order", [False, True])
def test_convolutions_with_cheap_second_derivatives_are_used_where_these_are_wanted(first_order: bool) -> None:
    builder = Builder()
    x = builder.input(random(SAMPLES, 2, 4, 4))
    for name, target in (("numbers", aten.conv2d.default), ("name", aten.conv2d.padding)):
        padding: Any = [1, 1] if name == "numbers" else "same"
        builder.call(target, x, builder.parameter(random(2, 2, 3, 3), name), None, [1, 1], padding)
    graph = builder.build(*builder.nodes)
    program = graph.giving(graph.nodes, first_order)
    assert program.first_order is first_order
    calls = [node.target for node in program._module.graph.nodes if node.op == "call_function"]
    used = [target for target in calls if target is not noticing_interrupts]
    assert len(calls) - len(used) == (2 if first_order else 0)
    assert used == [aten.conv2d.default if first_order else convolution, aten.conv2d.padding]
    assert [node.target for node in graph.nodes] == [aten.conv2d.default, aten.conv2d.padding]
    values = program({graph.inputs[0].name: x.meta["val"]}, graph.parameters)
    for node, value in zip(graph.nodes, values.values(), strict=True):
        torch.testing.assert_close(value, node.meta["val"])


def test_attention_has_second_derivatives_unless_they_are_not_wanted() -> None:
    _, graph = captured("attention")
    x = example("attention", 3)
    weight = graph.parameters["attention.in_proj_weight"].clone().requires_grad_()
    for first_order in (False, True):
        program = graph.giving(graph.outputs, first_order)
        parameters = {**graph.parameters, "attention.in_proj_weight": weight}
        with torch.enable_grad():
            (output,) = program({graph.inputs[0].name: x}, parameters).values()
            (gradient,) = torch.autograd.grad(output.square().sum(), weight, create_graph=True)
        if not first_order:
            (second,) = torch.autograd.grad(gradient.square().sum(), weight)
            assert float(second.abs().max()) > 0


def test_linearizations_are_kept_for_each_choice_of_parameters() -> None:
    _, graph = captured("mlp")
    program = graph.segment([graph.layers[0]], 100).body
    x = {program.reads[0]: example("mlp", 3)}
    for varying in (["0.weight"], ["0.weight"], ["0.weight", "2.weight"]):
        outputs, chain = program.linearize(x, graph.parameters, varying, torch.float64)
        pushed = chain.push([graph.parameters[name] for name in varying])
        assert [value.shape for value in pushed] == [value.shape for value in outputs]
    assert sorted(program._linearizations) == [("0.weight",), ("0.weight", "2.weight")]


SAMPLE_ROWS = torch.arange(24.0).view(3, 8)  # sample, feature


@pytest.mark.parametrize(
    ("layout", "value"),
    [
        (SampleLayout(0, False), SAMPLE_ROWS),
        (SampleLayout(1, False), SAMPLE_ROWS.T),
        (SampleLayout(0, False), SAMPLE_ROWS.reshape(24)),  # samples slow, features fast
        (SampleLayout(0, True), SAMPLE_ROWS.T.reshape(24)),  # features slow, samples fast
        (SampleLayout(1, True), SAMPLE_ROWS.view(3, 2, 4).permute(1, 2, 0).reshape(2, 12)),
        (SampleLayout(1, False), SAMPLE_ROWS.view(3, 2, 4).permute(1, 0, 2).reshape(2, 12)),
    ],
)
def test_one_row_per_sample(layout: SampleLayout, value: Tensor) -> None:
    assert torch.equal(layout.split(value, 3), SAMPLE_ROWS)
