"""What K counts, what depends on what, which values are alive, and where segments begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from snows.graph import Graph, Layer
from tests.graphs import SAMPLES, Builder, layer_of, random
from tests.networks import NETWORKS, call_arguments, captured, example
from tests.oracles import dependent_indices

aten = torch.ops.aten


def names(nodes: Sequence[Node]) -> list[str]:
    return [node.name for node in nodes]


# What K counts


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


@pytest.mark.parametrize("name", NETWORKS)
def test_operations_after_a_layer_are_those_that_autograd_finds(name: str) -> None:
    model, graph = captured(name)
    for layer in (layer for layer in graph.layers if layer.refusal is None):
        after = graph.operations_after(layer)
        found = [index for index, node in enumerate(graph.operations) if node in after]
        state = model.state_dict()
        assert found == dependent_indices(model, example(name, 2), state, layer.parameter, 1000), layer.name


def attention(leaves: bool = False, beside: bool = False) -> Graph:
    """Query, key and value of one input, attention written out, its projection; `leaves`: the query is an output too;
    `beside`: something else reads the value."""
    builder = Builder()
    x = builder.input(random(SAMPLES, 5, 6))
    query, key, value = (
        builder.call(aten.linear.default, x, builder.parameter(random(6, 6, seed=i), name))
        for i, name in enumerate(("query", "key", "value"))
    )
    turned = builder.call(aten.transpose.int, key, 1, 2)
    scores = builder.call(aten.softmax.int, builder.call(aten.matmul.default, query, turned), -1)
    if beside:
        builder.call(aten.relu.default, value)
    mixed = builder.call(aten.matmul.default, scores, value)
    out = builder.call(aten.linear.default, mixed, builder.parameter(random(6, 6), "out"))
    if beside:
        out = builder.call(aten.add.Tensor, out, builder.nodes[-3])
    normed = builder.call(aten.layer_norm.default, out, [6])
    last = builder.call(aten.linear.default, normed, builder.parameter(random(2, 6), "last"))
    return builder.build(*([last, query] if leaves else [last]))


def test_projections_that_only_feed_an_attention_belong_to_it() -> None:
    graph = attention()
    assert [str(node.target) for node in graph.operations] == [
        "aten.matmul.default", "aten.linear.default", "aten.layer_norm.default", "aten.linear.default",
    ]  # fmt: skip
    counts = {layer.name: len(graph.operations_after(layer)) for layer in graph.layers}
    assert counts == {"query": 4, "key": 4, "value": 4, "out": 3, "last": 1}


def test_a_projection_that_leaves_the_network_is_an_operation() -> None:
    assert len(attention(leaves=True).operations) == 5


def test_a_projection_that_something_else_reads_is_an_operation() -> None:
    graph = attention(beside=True)
    value = layer_of(graph, "value").node
    assert value in graph.operations
    assert layer_of(graph, "key").node not in graph.operations


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


# Questions about layers


def test_which_attention_a_projection_feeds() -> None:
    graph = attention()
    product = graph.operations[0]
    fed = {layer.name: graph.attention_fed_by(layer) for layer in graph.layers}
    assert fed == {"query": (product, 0), "key": (product, 0), "value": (product, 1), "out": None, "last": None}
    _, mlp = captured("mlp")
    assert [mlp.attention_fed_by(layer) for layer in mlp.layers] == [None] * 3


def test_what_is_before_a_layer() -> None:
    graph = attention()
    assert [layer.name for layer in graph.layers if graph.follows_attention(layer)] == ["out"]
    assert [layer.name for layer in graph.layers if graph.has_attention_before(layer)] == ["out", "last"]
    assert not any(graph.reads_table(layer) for layer in graph.layers)


def test_an_addition_ends_the_search_for_the_attention_before_a_layer() -> None:
    builder = Builder()
    x = builder.input(random(SAMPLES, 4, 5, 6))
    mixed = builder.call(aten.scaled_dot_product_attention.default, x, x, x)
    shaped = builder.call(aten.clone.default, mixed)
    builder.call(aten.linear.default, shaped, builder.parameter(random(6, 6), "near"))
    added = builder.call(aten.add.Tensor, shaped, x)
    builder.call(aten.linear.default, added, builder.parameter(random(6, 6), "behind addition"))
    graph = builder.build(*builder.nodes[-3:])
    assert [layer.name for layer in graph.layers if graph.follows_attention(layer)] == ["near"]


def test_reading_a_table() -> None:
    builder = Builder()
    tokens = builder.input(torch.zeros(SAMPLES, 5, dtype=torch.int64))
    x = builder.call(aten.embedding.default, builder.parameter(random(7, 6), "table"), tokens)
    builder.call(aten.linear.default, x, builder.parameter(random(3, 6), "a"))
    graph = builder.build()
    assert [graph.reads_table(layer) for layer in graph.layers] == [True]


def test_ancestors_and_descendants_tell_first_and_last_layers() -> None:
    _, graph = captured("two-inputs")
    first = [layer.name for layer in graph.layers if not graph.layer_ancestors(layer)]
    last = [layer.name for layer in graph.layers if not graph.layer_descendants(layer)]
    assert first == ["image", "number"]
    assert last == ["head"]
    joint = layer_of(graph, "joint.weight")
    assert [layer.name for layer in graph.layer_ancestors(joint)] == ["image", "number"]
    assert [layer.name for layer in graph.layer_descendants(joint)] == ["head"]


def test_a_weight_used_twice_depends_on_what_either_use_depends_on() -> None:
    _, graph = captured("tied")  # first, twice, between, twice, head
    twice, between = layer_of(graph, "twice.weight"), layer_of(graph, "between.weight")
    assert {layer.name for layer in graph.layer_ancestors(twice)} == {"first", "between"}
    assert {layer.name for layer in graph.layer_descendants(between)} == {"twice", "head"}
    assert {layer.name for layer in graph.layer_ancestors(between)} == {"first", "twice"}


def test_vectors_are_trained_and_read_as_they_are() -> None:
    _, graph = captured("conv-bn")  # scales and shifts of batch norms were computed from others
    assert graph.vectors == ["3.bias", "7.bias", "11.bias"]
    _, graph = captured("attention")
    norms = [f"norm{i}.{kind}" for i in (1, 2, 3) for kind in ("weight", "bias")]
    assert set(graph.vectors) >= {*norms, "embed.bias", "head.bias", "mlp.0.bias"}


def test_the_whole_network_may_be_piecewise_linear() -> None:
    linear = {name for name in NETWORKS if captured(name)[1].piecewise_linear}
    assert linear == NETWORKS.keys() - {"attention", "gated"}


# Running


@pytest.mark.parametrize("name", NETWORKS)
def test_values_alive_at_a_position_are_all_that_is_needed_there(name: str) -> None:
    _, graph = captured(name)
    leaves = pytree.tree_leaves(call_arguments(example(name, 3)))
    expected = graph.run(leaves)
    for position in range(graph.end + 1):
        values: dict[str, Any] = dict(zip(names(graph.inputs), leaves, strict=True))
        values |= graph.program(0, position)(values, graph.parameters)
        alive = {key: values[key] for key in graph.live(position)}
        later = {**alive, **graph.program(position, graph.end)(alive, graph.parameters)}
        for node, value in zip(graph.outputs, expected, strict=True):
            torch.testing.assert_close(later[node.name], value, rtol=0, atol=0)
        reads = {a.name for node in graph.nodes[position:] for a in node.all_input_nodes if "parameter" not in a.meta}
        before = {node.name for node in [*graph.inputs, *graph.nodes[:position]]}
        outputs = {node.name for node in graph.outputs}
        assert set(graph.live(position)) == (reads | outputs) & before
        sizes = {node.name: node.meta["bytes"] for node in [*graph.inputs, *graph.nodes]}
        assert graph.live_bytes(position) == sum(sizes[key] for key in alive)


def test_programs_are_made_once_and_parameters_may_be_given() -> None:
    _, graph = captured("mlp")
    assert graph.program(0, 2) is graph.program(0, 2)
    x = example("mlp", 3)
    zeros = {key: torch.zeros_like(value) for key, value in graph.parameters.items()}
    assert float(graph.run([x], zeros)[0].abs().max()) == 0
    assert float(graph.run([x])[0].abs().max()) > 0


def test_values_of_some_nodes_for_each_batch() -> None:
    _, graph = captured("mlp")
    batches = [{graph.inputs[0].name: example("mlp", n)} for n in (2, 5)]
    found = graph.outputs_of(graph.operations[1:2], batches)
    assert [list(values) for values in found] == [[graph.operations[1].name]] * 2
    assert [value.shape[0] for values in found for value in values.values()] == [2, 5]
    expected = graph.run_operations([example("mlp", 5)], graph.nodes[:1])
    assert set(expected) == {node.name for node in [*graph.operations, graph.nodes[0]]}
    torch.testing.assert_close(found[1][graph.operations[1].name], expected[graph.operations[1].name])


def test_a_graph_with_parameters_of_its_own() -> None:
    _, graph = captured("mlp")
    other = graph.with_own_parameters()
    other.parameters["0.weight"] = torch.zeros_like(other.parameters["0.weight"])
    assert float(graph.parameters["0.weight"].abs().max()) > 0
    assert other.nodes is graph.nodes


# Segments


@pytest.mark.parametrize("horizon", [0, 1, 2, 3, 100])
def test_a_segment_has_one_operation_more_than_its_horizon(horizon: int) -> None:
    _, graph = captured("mlp")
    for index, layer in enumerate(graph.layers):
        after = graph.operations[2 * index :]
        segment = graph.segment([layer], horizon)
        assert segment.outputs == tuple(names(after[: horizon + 1]))
        assert segment.horizon == min(horizon, len(after) - 1)
        assert segment.position == layer.position
        assert graph.segment([layer], horizon) is segment


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("horizon", [0, 2])
def test_a_segment_computes_what_the_network_does(name: str, horizon: int) -> None:
    _, graph = captured(name)
    leaves = pytree.tree_leaves(call_arguments(example(name, 3)))
    expected = graph.run_operations(leaves)
    inputs: dict[str, Any] = dict(zip(names(graph.inputs), leaves, strict=True))
    for layer in (layer for layer in graph.layers if layer.refusal is None):
        segment = graph.segment([layer], horizon)
        values = {**inputs, **graph.program(0, segment.position)(inputs, graph.parameters)}
        values = {key: values[key] for key in graph.live(segment.position)}
        prelude = segment.prelude(values, graph.parameters)
        found = segment.body({**values, **prelude}, graph.parameters)
        assert tuple(found) == segment.outputs
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=0, atol=0)
        assert layer.parameter in segment.body.parameters
        assert layer.parameter not in segment.prelude.parameters
        assert set(prelude) <= set(segment.body.reads)


def two_branches() -> tuple[Graph, Layer, Layer]:
    builder = Builder()
    x = builder.input(random(SAMPLES, 6))
    left, right = (
        builder.call(aten.linear.default, x, builder.parameter(random(6, 6, seed=i), name))
        for i, name in enumerate(("left", "right"))
    )
    builder.call(aten.relu.default, builder.call(aten.mul.Tensor, left, right))
    graph = builder.build()
    return graph, layer_of(graph, "left"), layer_of(graph, "right")


def test_layers_that_are_solved_together() -> None:
    """A product of two branches is linear in each of them, and not in both."""
    graph, left, right = two_branches()
    one, both = graph.segment([left], 1), graph.segment([left, right], 2)
    assert one.piecewise_linear
    assert not both.piecewise_linear
    assert both.outputs == tuple(names([left.node, right.node, graph.nodes[-1]]))
    assert both.layers == (left, right)
    assert [program.gives for program in both.own] == [(left.node.name,), (right.node.name,)]
    assert one.prelude.parameters == ("right",)
    assert both.prelude.gives == ()
    assert both.position == 0
    assert graph.segment([right, left], 2).position == 0
    assert one.cost == graph.cost([left], 1)
    assert both.cost == graph.cost([left, right], 2)


def test_segments_by_what_they_match() -> None:
    _, graph = captured("mlp")
    first = graph.layers[0]
    assert graph.segment([first], 0).is_one_layer
    assert not graph.segment([first], 1).is_one_layer
    assert graph.segment([first], 1).is_matched_itself
    packed = attention()
    query = layer_of(packed, "query")
    assert not packed.segment([query], 0).is_one_layer
    assert not packed.segment([query], 0).is_matched_itself
    branches, left, right = two_branches()
    assert not branches.segment([left, right], 0).is_one_layer


def test_piecewise_linear_segments() -> None:
    _, graph = captured("gated")
    found = {layer.name: graph.segment([layer], 0).piecewise_linear for layer in graph.layers}
    assert set(found.values()) == {True}
    stem = layer_of(graph, "stem.weight")
    assert not graph.segment([stem], 1).piecewise_linear  # hardswish
    _, residual = captured("residual")
    assert all(residual.segment([layer], 100).piecewise_linear for layer in residual.layers)


def test_samples_first_in_all_that_a_segment_reads() -> None:
    _, residual = captured("residual")
    assert all(residual.segment([layer], 2).batch_first for layer in residual.layers)
    _, graph = captured("attention")
    packed, out = (layer_of(graph, f"attention.{name}") for name in ("in_proj_weight", "out_proj.weight"))
    assert graph.segment([packed], 0).batch_first == samples_first(graph, packed, 0)
    assert not graph.segment([out], 0).batch_first
    assert not samples_first(graph, out, 0)


def samples_first(graph: Graph, layer: Layer, horizon: int) -> bool:
    """Whether every value that a segment reads has as many rows as there are samples, and no other such axis."""
    segment = graph.segment([layer], horizon)
    leaves = [example("attention", 13)]
    values: dict[str, Any] = dict(zip(names(graph.inputs), leaves, strict=True))
    values |= graph.program(0, segment.position)(values, graph.parameters)
    own = {*segment.prelude.gives}
    read = [values[key] for key in {*segment.prelude.reads, *segment.body.reads} - own]
    return all(isinstance(v, Tensor) and v.shape[0] == 13 and all(s % 13 for s in v.shape[1:]) for v in read)
