"""Bytes and flops against counts made by hand and by watching the model itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snows.graph.cost import bytes_of
from snows.graph.operators import OPERATORS
from tests.graphs import CASES, OTHER, SAMPLES, Builder, layer_of, made, random
from tests.networks import NETWORKS, call_arguments, captured, example

aten = torch.ops.aten

# Multiplications for one output element, times the elements of one sample.
PRODUCTS = {
    "conv1d": (4 * 3) * (5 * 6),
    "conv2d": (2 * 9) * (6 * 3 * 3),  # in two groups, with a stride of two
    "conv3d": (4 * 8) * (5 * 2 * 2 * 2),
    "conv1d.padding": (4 * 3) * (5 * 6),
    "conv2d.padding": (4 * 9) * (5 * 6 * 6),
    "conv3d.padding": (4 * 27) * (5 * 3 * 3 * 3),
    "linear": 6 * (4 * 6 * 5),
    "conv_transpose1d": (5 * 3) * (4 * 6),  # here for one input element
    "conv_transpose2d": (5 * 4) * (4 * 6 * 6),
    "conv_transpose3d": (5 * 8) * (4 * 3 * 3 * 3),
    "scaled_dot_product_attention": 6 * (4 * 6 * 6) + 6 * (4 * 6 * 5),
    "matmul": 6 * (4 * 6 * 5),
    "bmm": 6 * (4 * 5),
    "mm": 6 * 5,
    "addmm": 6 * 5,
    "baddbmm": 6 * (4 * 5),
    "einsum": 6 * (4 * 6 * 5),
}


def test_products_are_the_operations_with_products() -> None:
    assert {name for name, row in OPERATORS.items() if row.products} == PRODUCTS.keys()


@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_of_products_by_hand(name: str) -> None:
    builder, _, _ = made(CASES[name])
    builder.build()
    assert builder.nodes[0].meta["flops"] == 2 * PRODUCTS[name]


@pytest.mark.parametrize("name", [name for name in CASES if name not in {*PRODUCTS, "embedding"}])
def test_flops_of_other_operations_are_their_elements(name: str) -> None:
    builder, _, _ = made(CASES[name])
    builder.build()
    node = builder.nodes[0]
    values = [node.meta["val"]] if isinstance(node.meta["val"], Tensor) else node.meta["val"]
    assert node.meta["flops"] == sum(value.numel() for value in values) // SAMPLES
    assert bytes_of(node) == sum(math.ceil(value.nbytes / SAMPLES) for value in values)


def watched(model: nn.Module, inputs: Any) -> tuple[int, dict[str, int]]:
    """Flops of all products of the eager model, and how often each weight is used."""
    found: list[int] = []
    positions: dict[str, int] = {}

    def layer(name: str, module: Any, output: Tensor) -> None:
        found.append(2 * output.numel() * math.prod(module.weight.shape[1:]))
        positions[f"{name}.weight"] = output.numel() // module.weight.shape[0]

    def attention(name: str, module: Any, arguments: tuple[Tensor, ...]) -> None:
        samples, tokens, width = arguments[0].shape
        projections = samples * tokens * width * (3 * width + width)
        found.append(2 * (projections + 2 * samples * tokens * tokens * width))
        positions[f"{name}.in_proj_weight"] = positions[f"{name}.out_proj.weight"] = samples * tokens

    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            handles.append(module.register_forward_hook(lambda m, a, _, name=name: attention(name, m, a)))
        elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear) and "out_proj" not in name:
            handles.append(module.register_forward_hook(lambda m, _, out, name=name: layer(name, m, out)))
    args, kwargs = call_arguments(inputs)
    with torch.no_grad():
        model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return sum(found), positions


@pytest.mark.parametrize("name", NETWORKS)
def test_flops_of_networks_against_the_eager_model(name: str) -> None:
    model, graph = captured(name)
    flops, positions = watched(model, example(name, 1))
    nodes = [node for node in graph.nodes if any(word in node.name for word in ("conv", "linear", "attention"))]
    assert sum(node.meta["flops"] for node in nodes) == flops
    used_once = {layer.parameter: layer.positions for layer in graph.layers if layer.refusal is None}
    assert used_once == {name: count for name, count in positions.items() if name in used_once}


def test_the_cost_of_a_segment_by_hand() -> None:
    builder = Builder()
    x, beside = builder.input(random(SAMPLES, 6)), builder.input(random(SAMPLES, 8))
    linear = builder.call(aten.linear.default, x, builder.parameter(random(8, 6), "first"))
    branch = builder.call(aten.tanh.default, beside)
    product = builder.call(aten.mul.Tensor, linear, branch)
    rectified = builder.call(aten.relu.default, product)
    builder.call(aten.linear.default, rectified, builder.parameter(random(3, 8), "last"))
    graph = builder.build()
    cost = graph.cost([layer_of(graph, "first")], 1)
    assert graph.segment([layer_of(graph, "first")], 1).cost == cost
    number = 8  # bytes
    assert cost.bytes == number * (8 + 8 + 8)
    assert cost.output_bytes == number * (8 + 8)
    assert cost.prelude_bytes == number * 8
    assert cost.input_bytes == number * 6
    assert cost.slope_bytes == number * (6 + 8 + 8)  # the layer's input, the other factor, slopes
    assert cost.largest_bytes == number * 8
    assert cost.flops == 2 * 6 * 8 + 8 + 8
    two = graph.cost([layer_of(graph, "first")], 100)
    assert two.output_bytes == number * (8 + 8 + 3)
    assert two.slope_bytes == cost.slope_bytes
    assert two.flops == cost.flops + 2 * 8 * 3


def test_parameters_and_sizes_count_nothing() -> None:
    builder = Builder()
    x = builder.input(OTHER)
    size = builder.call(aten.sym_size.int, x, 1)
    builder.call(aten.mul.Tensor, x, OTHER)
    builder.build()
    assert bytes_of(x) == OTHER.nbytes // SAMPLES
    assert bytes_of(builder.nodes[1].all_input_nodes[1]) == 0
    assert bytes_of(size) == 0
    assert size.meta["flops"] == 0


def test_bytes_are_of_one_sample_rounded_up() -> None:
    builder = Builder()
    builder.call(aten.logical_not.default, builder.input(torch.zeros(5, dtype=torch.bool)))
    builder.build()
    assert bytes_of(builder.inputs[0]) == 1
