"""Layers against the modules they were captured from, and as matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from snows.graph import Layer
from snows.graph.layers import find_layers, layer_name, module_of
from tests.graphs import SAMPLES, Builder, layer_of, random
from tests.networks import NETWORKS, call_arguments, captured, example, prunable

aten = torch.ops.aten


@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer_is_found_in_order(name: str) -> None:
    model, graph = captured(name)
    found = [layer for layer in graph.layers if layer.refusal is None]
    assert {layer.parameter for layer in found} == set(prunable(name))
    assert [layer.position for layer in found] == sorted(layer.position for layer in found)
    for layer in found:
        assert torch.equal(graph.parameters[layer.parameter], model.get_parameter(layer.parameter))
        assert layer.name == layer.parameter.removesuffix(".weight")
        assert graph.nodes[layer.position] is layer.node
        assert layer.uses == (layer.node,)
        assert layer.weight.meta["parameter"] == layer.parameter
        if layer.parameter.endswith(".in_proj_weight"):
            continue
        module = model.get_submodule(layer.name)
        assert module_of(layer.node) == layer.name or "out_proj" in layer.name
        assert layer.bias == (None if module.bias is None else f"{layer.name}.bias")
        assert layer.columns == module.weight[0].numel()
        if layer.is_convolution:
            assert layer.stride == module.stride
            assert layer.dilation == module.dilation
            assert layer.groups == module.groups
            if isinstance(module.padding, tuple) or isinstance(layer.padding, str):
                assert layer.padding == module.padding


@pytest.mark.parametrize("name", NETWORKS)
def test_patches_times_weight_is_the_layer(name: str) -> None:
    _, graph = captured(name)
    layers = [layer for layer in graph.layers if layer.refusal is None]
    leaves = pytree.tree_leaves(call_arguments(example(name, 3)))
    values = dict(zip((node.name for node in graph.inputs), leaves, strict=True))
    values |= graph.giving([n for layer in layers for n in (layer.node, *layer.node.all_input_nodes)])(
        values, graph.parameters
    )
    for layer in layers:
        output = values[layer.node.name]
        if layer.bias is not None:
            bias = graph.parameters[layer.bias]
            output = output - (bias.view(-1, *[1] * (len(layer.shape) - 2)) if layer.is_convolution else bias)
        weight = graph.parameters[layer.parameter].flatten(1).unflatten(0, (layer.groups, -1))
        patches = layer.patches(values[layer.input])
        product = layer.in_weight_order(patches, -1) @ weight.transpose(1, 2)
        torch.testing.assert_close(product, layer.outputs(output), rtol=1e-10, atol=1e-12)
        assert product.shape[1] == 3 * layer.positions


def convolution(**options: object) -> Layer:
    builder = Builder()
    x = builder.input(random(SAMPLES, 4, 6, 6))
    builder.call(aten.conv2d.default, x, builder.parameter(random(6, 2, 3, 3), "a.weight"), groups=2, **options)
    return layer_of(builder.build(), "a.weight")


def test_options_by_name_and_with_one_number() -> None:
    layer = convolution(stride=[2], padding=[1, 0], dilation=[1])
    assert (layer.stride, layer.padding, layer.dilation, layer.groups) == ((2, 2), (1, 0), (1, 1), 2)
    plain = convolution()
    assert (plain.stride, plain.padding, plain.dilation) == ((1, 1), (0, 0), (1, 1))
    assert plain.bias is None


def test_columns_in_the_order_of_the_weight_along_several_axes() -> None:
    layer = convolution()
    columns = torch.arange(18)
    memory = columns.view(2, 9).T.flatten()  # kernel positions first, channels last
    assert layer.in_weight_order(memory, 0).tolist() == columns.tolist()
    square = memory[:, None] * 100 + memory[None]
    expected = columns[:, None] * 100 + columns[None]
    assert torch.equal(layer.in_weight_order(square, 0, 1), expected)


def test_a_kernel_of_one_needs_no_order() -> None:
    layer = Layer("a", "a.weight", torch.Size([3, 4, 1, 1]))
    value = random(2, 4)
    assert layer.in_weight_order(value, -1) is value


def test_a_weight_is_used_once_at_least() -> None:
    builder = Builder()
    builder.call(aten.linear.default, builder.input(random(1, 6)), builder.parameter(random(5, 6), "a"))
    layer = layer_of(builder.build(), "a")  # counted as one of eleven samples
    assert layer.positions == 1


def test_what_is_no_layer() -> None:
    builder = Builder()
    x = builder.input(random(SAMPLES, 6))
    vector = builder.parameter(random(6), "vector")
    computed = builder.call(aten.exp.default, builder.parameter(random(5, 6), "before"))
    builder.call(aten.linear.default, x, vector)
    builder.call(aten.linear.default, x, computed)
    builder.call(aten.matmul.default, x, builder.parameter(random(6, 5), "matrix"))
    builder.call(aten.linear.default, x, builder.input(random(5, 6)))
    assert find_layers(builder.nodes, builder.names, builder.parameters) == []


def test_a_weight_that_something_else_reads_too() -> None:
    builder = Builder()
    x, weight = builder.input(random(SAMPLES, 6)), builder.parameter(random(5, 6), "a.weight")
    layer = builder.call(aten.linear.default, x, weight)
    norm = builder.call(aten.sum.default, weight)
    builder.call(aten.div.Tensor, layer, norm)
    (found,) = find_layers(builder.nodes, builder.names, builder.parameters)
    assert found.uses == (layer, norm)
    assert found.refusal == "its weight is used in 2 places (the model itself)"


def test_names() -> None:
    assert layer_name("block.conv.weight") == "block.conv"
    assert layer_name("attention.in_proj_weight") == "attention.in_proj_weight"
    assert layer_name("weight") == "weight"


@pytest.mark.parametrize(("padding", "kernel"), [("valid", (3, 3)), ("same", (2, 4)), ([1, 2], (3, 3))])
def test_padding_by_name_and_by_number(padding: object, kernel: tuple[int, int]) -> None:
    x, weight, builder = random(SAMPLES, 4, 6, 6), random(5, 4, *kernel), Builder()
    overload = aten.conv2d.padding if isinstance(padding, str) else aten.conv2d.default
    weights = builder.parameter(weight, "a.weight")
    node = builder.call(overload, builder.input(x), weights, None, [1], padding, [1])
    layer = layer_of(builder.build(), "a.weight")
    product: Tensor = layer.in_weight_order(layer.patches(x), -1) @ weight.flatten(1).T
    torch.testing.assert_close(product, layer.outputs(node.meta["val"]))
