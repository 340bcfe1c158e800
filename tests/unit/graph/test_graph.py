"""Capture, layers, what K counts, streams, and the convolution of our own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from snows.data.streams import Batches, Stream
from snows.errors import CaptureError, InputError
from snows.graph import Graph, Layer, capture
from snows.graph.convolution import convolution
from tests.networks import NETWORKS, call_arguments, captured, example, prunable
from tests.oracles import operations


def layer_of(graph: Graph, parameter: str) -> Layer:
    return next(layer for layer in graph.layers if layer.parameter == parameter)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_graph_gives_the_models_outputs_at_another_batch_size(name: str) -> None:
    model, graph = captured(name)
    for samples in (1, 7):
        args, kwargs = call_arguments(example(name, samples, seed=samples))
        with torch.no_grad():
            expected = pytree.tree_leaves(model(*args, **kwargs))
            found = graph.run(pytree.tree_leaves((args, kwargs)))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer_is_found_in_order(name: str) -> None:
    model, graph = captured(name)
    found = [layer for layer in graph.layers if layer.refusal is None]
    assert {layer.parameter for layer in found} == set(prunable(name))
    assert [layer.position for layer in found] == sorted(layer.position for layer in found)
    for layer in found:
        assert torch.equal(graph.parameters[layer.parameter], model.get_parameter(layer.parameter))
        assert layer.name == layer.parameter.removesuffix(".weight")
        if layer.parameter.endswith(".in_proj_weight"):
            continue
        module = model.get_submodule(layer.name)
        assert layer.bias == (None if module.bias is None else f"{layer.name}.bias")
        if layer.is_convolution:
            assert layer.stride == module.stride
            assert layer.dilation == module.dilation
            assert layer.groups == module.groups
            if isinstance(module.padding, tuple) or isinstance(layer.padding, str):
                assert layer.padding == module.padding


@pytest.mark.parametrize("name", NETWORKS)
def test_patches_times_weight_is_the_layer(name: str) -> None:
    _, graph = captured(name)
    dense = Stream(graph, graph.parameters, Batches([batch_of(graph, name, 3)], (3,)))
    for layer in (layer for layer in graph.layers if layer.refusal is None):
        dense.advance(layer.position)
        values = dense[0]
        segment = graph.segment([layer], 0)
        output = segment.own[0](values, graph.parameters)[segment.own[0].gives[0]]
        if layer.bias is not None:
            bias = graph.parameters[layer.bias]
            output = output - (bias.view(-1, *[1] * (len(layer.shape) - 2)) if layer.is_convolution else bias)
        weight = graph.parameters[layer.parameter].flatten(1).unflatten(0, (layer.groups, -1))
        product = layer.in_weight_order(layer.patches(values[layer.input]), -1) @ weight.transpose(1, 2)
        torch.testing.assert_close(product, layer.outputs(output), rtol=1e-10, atol=1e-12)


def batch_of(graph: Graph, name: str, samples: int) -> dict[str, Any]:
    leaves = pytree.tree_leaves(call_arguments(example(name, samples)))
    return {node.name: leaf for node, leaf in zip(graph.inputs, leaves, strict=True)}


@pytest.mark.parametrize("name", NETWORKS)
def test_operations_are_those_of_the_eager_model(name: str) -> None:
    """Each counted module gives one operation; batch norms, additions and pooling none."""
    model, graph = captured(name)
    values = graph.run_operations(pytree.tree_leaves(call_arguments(example(name, 3))))
    seen = operations(model, example(name, 3), model.state_dict())
    found = [values[node.name] for node in graph.operations]
    assert len(found) == len(seen)
    for operation, module_output in zip(found, seen, strict=True):
        if operation.shape != module_output.shape:  # attention keeps its heads, samples and tokens in other axes
            operation, module_output = (value.flatten().sort().values for value in (operation, module_output))
        torch.testing.assert_close(operation, module_output, rtol=1e-10, atol=1e-12)


def count_after(name: str, parameter: str) -> int:
    _, graph = captured(name)
    return len(graph.operations_after(layer_of(graph, parameter)))


def test_a_parallel_branch_is_not_ahead() -> None:
    # conv1, relu1, conv2, relu2, last, last_relu, head; not the shortcut
    assert count_after("residual", "conv1.weight") == 7
    # the shortcut itself, relu2, last, last_relu, head
    assert count_after("residual", "shortcut.0.weight") == 5
    # left.0, its ReLU, left.2; the right head hangs from the trunk
    assert count_after("two-outputs", "left.0.weight") == 3
    assert count_after("two-outputs", "right.weight") == 1
    _, graph = captured("residual")
    segment = graph.segment([layer_of(graph, "conv1.weight")], 3)
    assert segment.horizon == 3
    assert [parameter for parameter in segment.prelude.parameters if parameter.startswith("shortcut")]
    assert not [parameter for parameter in segment.body.parameters if parameter.startswith("shortcut.0")]


def test_the_first_operation_of_packed_projections_is_the_attention() -> None:
    _, graph = captured("attention")
    layer = layer_of(graph, "attention.in_proj_weight")
    first, second = graph.operations_after(layer)[:2]
    assert "scaled_dot_product_attention" in str(first.target)
    assert "linear" in str(second.target)
    segment = graph.segment([layer], 0)
    assert segment.outputs == (first.name,)
    assert segment.outputs != segment.own[0].gives  # so the closed form is not the answer there
    # attention, out_proj, norm2, mlp.0, gelu, mlp.2, norm3, head
    assert len(graph.operations_after(layer)) == 8


def test_a_horizon_beyond_the_end_takes_what_there_is() -> None:
    _, graph = captured("mlp")
    assert graph.segment([layer_of(graph, "2.weight")], 100).horizon == 2
    assert graph.segment([layer_of(graph, "4.weight")], 5).horizon == 0


def test_ancestors_and_descendants_tell_first_and_last_layers() -> None:
    _, graph = captured("two-inputs")
    first = [layer.name for layer in graph.layers if not graph.layer_ancestors(layer)]
    last = [layer.name for layer in graph.layers if not graph.layer_descendants(layer)]
    assert first == ["image", "number"]
    assert last == ["head"]


def test_streams_advance_and_free_what_is_not_read_again() -> None:
    _, graph = captured("residual")
    stream = Stream(
        graph, graph.parameters, Batches([batch_of(graph, "residual", 2), batch_of(graph, "residual", 1)], (2, 1))
    )
    seen: list[weakref.ref[Tensor]] = []
    for position in range(1, graph.end + 1):
        stream.advance(position)
        for values in (stream[i] for i in range(2)):
            assert set(values) == set(graph.live(position))
            seen += [weakref.ref(value) for value in values.values() if isinstance(value, Tensor)]
    gc.collect()
    alive = {id(value) for i in range(2) for value in stream[i].values()}
    assert all(reference() is None or id(reference()) in alive for reference in seen)
    assert set(stream[0]) == {node.name for node in graph.outputs}
    position = stream.position
    stream.advance(position)  # nothing to do
    assert stream.position == position


def test_streams_read_a_weight_changed_before_its_layer_is_passed() -> None:
    model, graph = captured("mlp")
    parameters = dict(graph.parameters)
    stream = Stream(graph, parameters, Batches([batch_of(graph, "mlp", 3)], (3,)))
    stream.advance(layer_of(graph, "2.weight").position)
    parameters["2.weight"] = torch.zeros_like(parameters["2.weight"])
    stream.advance(graph.end)
    with torch.no_grad():
        changed = torch.func.functional_call(model, {"2.weight": parameters["2.weight"]}, (example("mlp", 3),))
    torch.testing.assert_close(stream[0][graph.outputs[0].name], changed)


def test_two_samples_are_enough_to_tell_samples_from_tokens() -> None:
    """nn.MultiheadAttention projects its output with samples as the fast index, not the slow one."""
    model, graph = captured("attention")
    again = capture(model, (example("attention", 2),), {})
    layouts = [node.meta["sample_layout"] for node in graph.operations]
    assert [node.meta["sample_layout"] for node in again.operations] == layouts
    assert None not in layouts
    assert any(layout.inner for layout in layouts)


# Layers that cannot be pruned


class TiedModules(nn.Module):
    """Two modules, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.middle(self.encoder(x)).relu())


class Odd(nn.Module):
    """A transposed convolution, a computed weight, a transformed weight and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(2, 4, 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1))
        self.scaled = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.constant = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.normed(self.up(x)).mean((2, 3))
        x = F.linear(x, 2 * self.scaled.weight)
        return self.head(x + self.constant(torch.ones(4)))


def refusals(graph: Graph) -> dict[str, str | None]:
    return {layer.name: layer.refusal for layer in graph.layers}


def test_a_weight_used_twice_is_refused_naming_the_places() -> None:
    twice = refusals(captured("tied")[1])["twice"]
    assert twice == "its weight is used in 2 places (twice)"
    found = refusals(capture(TiedModules().eval(), (torch.randn(3, 4),), {}))
    assert found == {"encoder": "its weight is used in 2 places (decoder, encoder)", "middle": None}


def test_other_layers_are_refused_with_their_reason() -> None:
    found = refusals(capture(Odd().eval(), (torch.randn(3, 2, 3, 3),), {}))
    assert found == {
        "up": "transposed convolutions are not supported",
        "normed": "its weight is computed from other parameters",
        "scaled": "its weight is transformed before it is used",
        "unused": "forward does not use it",
        "constant": "its input is the same whatever the data, so there is nothing to match",
        "head": None,
    }


# Models that cannot be captured


class Forward(nn.Module):
    """A linear layer with some forward around it."""

    def __init__(self, forward: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.of = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.fc, x)


UNCAPTURABLE = {
    "a branch on values": (
        lambda fc, x: fc(x) if x.sum() > 0 else -fc(x),
        r"^Forward cannot be captured by torch\.export: .*branches that depend on values",
    ),
    "dropout that is always on": (
        lambda fc, x: F.dropout(fc(x), 0.5, training=True),
        r"^Forward gives different outputs for the same input in eval mode .*make its forward deterministic",
    ),
    "a batch size in reshape": (lambda fc, x: fc(x).reshape(2, 2, 2).flatten(1), "take the batch size from x.shape"),
    "a batch size in a constant": (lambda fc, x: fc(x) + torch.ones(2, 4), "take the batch size from x.shape"),
}


@pytest.mark.parametrize("case", UNCAPTURABLE)
def test_what_cannot_be_captured_is_said_in_a_sentence(case: str) -> None:
    forward, words = UNCAPTURABLE[case]
    with pytest.raises(CaptureError, match=words):
        capture(Forward(forward).eval(), (torch.randn(4, 4),), {})


def test_other_wrong_inputs_of_capture() -> None:
    class Variadic(nn.Module):
        def forward(self, *xs: Tensor) -> Tensor:
            return xs[0]

    with pytest.raises(CaptureError, match=r"takes \*xs; give its inputs names"):
        capture(Variadic(), (torch.randn(4, 4),), {})
    with pytest.raises(InputError, match="does not run on the data"):
        capture(nn.Linear(3, 3), (torch.randn(4, 4),), {})
    with pytest.raises(CaptureError, match="samples; expected the same number in each"):
        capture(nn.Bilinear(2, 2, 2), (torch.randn(4, 2), torch.randn(3, 2)), {})


# The convolution of our own

CONVOLUTIONS = {
    "1d": ((2, 4, 7), (4, 4, 3), {"stride": [2], "padding": [1], "dilation": [2]}),
    "2d": ((2, 3, 4, 5), (2, 3, 3, 2), {"stride": [2, 1], "padding": [1, 0], "dilation": [1, 2]}),
    "2d, one number for both axes": ((2, 2, 5, 5), (2, 2, 2, 2), {"stride": [2], "padding": [1]}),
    "2d, defaults": ((2, 2, 4, 4), (3, 2, 2, 2), {}),
    "2d, rows left over by the stride": ((1, 2, 6, 6), (2, 2, 3, 3), {"stride": [2, 2]}),
    "grouped": ((2, 4, 4, 4), (6, 2, 3, 3), {"padding": [1, 1], "groups": 2}),
    "depthwise": ((2, 3, 4, 4), (3, 1, 3, 3), {"stride": [2, 2], "padding": [1, 1], "groups": 3}),
    "3d": ((1, 2, 3, 3, 4), (2, 2, 2, 1, 2), {"stride": [1, 1, 2], "padding": [1, 0, 1]}),
}


@pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # gradcheck, on inputs that do not vary
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution_and_its_derivatives(case: str, bias: bool) -> None:
    shape, weight_shape, options = CONVOLUTIONS[case]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    weight = torch.randn(weight_shape, generator=generator, dtype=torch.float64)
    shift = torch.randn(weight_shape[0], generator=generator, dtype=torch.float64) if bias else None
    reference = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(shape)]
    expected = reference(x, weight, shift, **options)
    torch.testing.assert_close(convolution(x, weight, shift, **options), expected)
    for varying in (x, weight):
        variable = varying.clone().requires_grad_()

        def ours(v: Tensor, varying: Tensor = varying) -> Tensor:
            return convolution(*((v, weight) if varying is x else (x, v)), shift, **options)

        torch.testing.assert_close(ours(variable), expected)
        assert torch.autograd.gradcheck(ours, variable)
        assert torch.autograd.gradgradcheck(ours, variable)
