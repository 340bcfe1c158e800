"""Channels that belong together: re-ordering them changes no output, and none that could be found is missed."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from snows.graph.channels import Members, find_spaces
from snows.graph.operators import OPERATORS, Channels
from tests.graphs import CASES, SAMPLES, Builder, X, random

aten = torch.ops.aten
CHANNELS = 4


class Network(Builder):
    """Operations between a first and a last layer; `first` makes four channels at axis 1."""

    def __init__(self) -> None:
        super().__init__()
        self.x = self.input(random(SAMPLES, 2, 6, 6, seed=4))
        self.first = self.convolution(self.x, "first", CHANNELS, 2)

    def convolution(self, x: Node, name: str, made: int, read: int, groups: int = 1) -> Node:
        weight, bias = random(made, read, 1, 1, seed=len(name)), random(made, seed=len(name))
        x_, w, b = x, self.parameter(weight, f"{name}.weight"), self.parameter(bias, f"{name}.bias")
        return self.call(aten.conv2d.default, x_, w, b, [1, 1], [0, 0], [1, 1], groups)

    def last(self, x: Node) -> Node:
        return self.convolution(x, "last", 3, CHANNELS)

    def spaces(self, *outputs: Node) -> list[Members]:
        """What is found, after a check that re-ordering it changes nothing."""
        graph = self.build(*outputs)
        tensors = dict(self.parameters)
        found = find_spaces(graph, tensors)
        leaves = [node.meta["val"] for node in graph.inputs]
        expected = graph.run(leaves)
        for members in found:
            size = tensors[members[0][0]].shape[members[0][1]]
            order = torch.randperm(size, generator=torch.Generator().manual_seed(1))
            changed = dict(tensors)
            for name, axis in members:
                changed[name] = changed[name].index_select(axis, order)
            for a, b in zip(graph.run(leaves, changed), expected, strict=True):
                torch.testing.assert_close(a, b)
        return [sorted(members) for members in found]


BOTH = [("first.bias", 0), ("first.weight", 0), ("last.weight", 1)]

# What comes between two layers: (whether the channels may still be re-ordered, what it is)
LINKS: dict[str, tuple[bool, Callable[[Network, Node], Node]]] = {
    "nothing": (True, lambda n, x: x),
    "a sum of both operands": (True, lambda n, x: n.call(aten.add.Tensor, x, n.call(aten.neg.default, x))),
    "flattened and back": (
        True,
        lambda n, x: n.call(aten.view.default, n.call(aten.flatten.using_ints, x, 2), [SAMPLES, 4, 6, 6]),
    ),
    "reshaped into other channels": (
        False,
        lambda n, x: n.call(aten.view.default, n.call(aten.view.default, x, [SAMPLES, 2, 72]), [SAMPLES, 4, 6, 6]),
    ),
    "moved and moved back": (
        True,
        lambda n, x: n.call(aten.permute.default, n.call(aten.permute.default, x, [0, 2, 3, 1]), [0, -1, 1, 2]),
    ),
    "transposed twice": (
        True,
        lambda n, x: n.call(aten.transpose.int, n.call(aten.transpose.int, x, 1, -1), 3, 1),
    ),
    "positions swapped": (True, lambda n, x: n.call(aten.transpose.int, x, 2, 3)),
    "the mean over positions": (True, lambda n, x: n.call(aten.mean.dim, x, [2, 3], True)),
    "the mean over positions, from the end": (True, lambda n, x: n.call(aten.mean.dim, x, [-1, -2], True)),
    "the mean over positions, and an axis again": (
        True,
        lambda n, x: n.call(aten.unsqueeze.default, n.call(aten.mean.dim, x, [3]), 2),
    ),
    "a slice of positions": (True, lambda n, x: n.call(aten.slice.Tensor, x, 3, 1, 4)),
    "a slice of channels, joined": (
        False,
        lambda n, x: n.call(aten.cat.default, [n.call(aten.slice.Tensor, x, 1, 0, 2)] * 2, 1),
    ),
    "one position, and an axis again": (
        True,
        lambda n, x: n.call(aten.unsqueeze.default, n.call(aten.select.int, x, -1, 2), -1),
    ),
    "one channel for all": (
        False,
        lambda n, x: n.call(aten.expand.default, n.call(aten.slice.Tensor, x, 1, 0, 1), [SAMPLES, 4, 6, 6]),
    ),
    "joined along positions": (True, lambda n, x: n.call(aten.cat.default, [x, x], 2)),
    "joined along positions, from the end": (True, lambda n, x: n.call(aten.cat.default, [x, x], -1)),
    "padded positions": (True, lambda n, x: n.call(aten.pad.default, x, [1, 0, 0, 1])),
    "padded channels": (
        False,
        lambda n, x: n.call(aten.slice.Tensor, n.call(aten.pad.default, x, [0, 0, 0, 0, 1, 0]), 1, 0, 4),
    ),
    "slopes of each channel": (True, lambda n, x: n.call(aten.prelu.default, x, n.parameter(random(4), "slopes"))),
    "one slope": (True, lambda n, x: n.call(aten.prelu.default, x, n.parameter(random(1), "slopes"))),
    "a scale of each channel": (
        True,
        lambda n, x: n.call(aten.mul.Tensor, x, n.parameter(random(4, 1, 1), "scale")),
    ),
    "one of several values": (
        True,
        lambda n, x: n.call(operator.getitem, n.call(aten.max_pool2d_with_indices.default, x, [2, 2]), 0),
    ),
    "split channels": (
        False,
        lambda n, x: n.call(
            aten.cat.default, [n.call(operator.getitem, n.call(aten.split.Tensor, x, 2, 1), i) for i in (0, 1)], 1
        ),
    ),
    "an operation without a row": (False, lambda n, x: n.call(aten.sin.default, x)),
    "a layer for each channel": (True, lambda n, x: n.convolution(x, "depthwise", 4, 1, 4)),
    "a layer in groups": (False, lambda n, x: n.convolution(x, "grouped", 4, 2, 2)),
    "normed over channels": (
        True,
        lambda n, x: n.call(
            aten.permute.default,
            n.call(aten.layer_norm.default, n.call(aten.permute.default, x, [0, 2, 3, 1]), [4], random(4), random(4)),
            [0, 3, 1, 2],
        ),
    ),
}


@pytest.mark.parametrize("link", LINKS)
def test_channels_between_two_layers(link: str) -> None:
    free, between = LINKS[link]
    network = Network()
    result = network.last(between(network, network.first))
    found = network.spaces(result)
    if not free:
        assert found == []
        return
    (space,) = found
    assert [member for member in space if member in BOTH] == BOTH
    own = {name: axis for name, axis in space if (name, axis) not in BOTH}
    if link in ("slopes of each channel", "a scale of each channel"):
        assert own == {"slopes" if "slopes" in link else "scale": 0}
    elif link == "a layer for each channel":
        assert own == {"depthwise.weight": 0, "depthwise.bias": 0}
    elif link == "normed over channels":
        assert set(own.values()) == {0}
        assert len(own) == 2
    else:
        assert own == {}


SAME_SHAPE = [name for name, row in OPERATORS.items() if row.channels in (Channels.SAME, Channels.WINDOW)]


@pytest.mark.parametrize("name", SAME_SHAPE)
def test_operations_that_treat_channels_alike(name: str) -> None:
    """Re-ordering the channels, at axis 1, before the operation or after it gives the same."""
    case = CASES[name]
    order, axis = torch.tensor([2, 0, 3, 1]), 1
    size = case.shape[axis]
    operands = len(case.shape)

    def moved(value: object) -> object:
        aligned = isinstance(value, Tensor) and value.ndim >= operands - axis and value.shape[axis - operands] == size
        return value.index_select(axis - operands, order) if aligned and isinstance(value, Tensor) else value

    args = [moved(case.x if argument is X else argument) for argument in case.args]
    value = case.target(*args, **case.kwargs)
    first = value if isinstance(value, Tensor) else value[0]
    torch.testing.assert_close(first, case.run(case.x).index_select(axis, order))


@pytest.mark.parametrize("name", [name for name in SAME_SHAPE if OPERATORS[name].channels is Channels.WINDOW])
def test_windows_mix_as_many_axes_as_their_row_says(name: str) -> None:
    builder = Builder()
    case = CASES[name]
    mixed = OPERATORS[name].window_axes
    assert mixed == len(case.shape) - 2
    kernel = [1] * mixed
    x = builder.input(random(SAMPLES, 2, *case.shape[2:]))
    layer = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}[mixed]
    first = builder.call(layer, x, builder.parameter(random(4, 2, *kernel), "first"))
    result = builder.call(layer, case.add_to(builder, first), builder.parameter(random(3, 4, *kernel), "last"))
    (space,) = find_spaces(builder.build(result), dict(builder.parameters))
    assert sorted(space) == [("first", 0), ("last", 1)]


def linear_network(*between: Callable[[Builder, Node], Node]) -> Builder:
    """Channels along the last axis."""
    builder = Builder()
    x = builder.input(random(SAMPLES, 5, 6))
    y = builder.call(
        aten.linear.default, x, builder.parameter(random(4, 6), "first"), builder.parameter(random(4), "b")
    )
    for operation in between:
        y = operation(builder, y)
    builder.call(aten.linear.default, y, builder.parameter(random(3, 4), "last"))
    return builder


def test_channels_of_linear_layers_are_at_the_last_axis() -> None:
    builder = linear_network()
    assert [sorted(s) for s in find_spaces(builder.build(), builder.parameters)] == [
        [("b", 0), ("first", 0), ("last", 1)]
    ]


def test_windows_over_the_channels_fix_them() -> None:
    builder = linear_network(lambda b, y: b.call(aten.avg_pool1d.default, y, [3], [1], [1]))
    assert find_spaces(builder.build(), builder.parameters) == []


def test_positions_in_a_window_are_fixed() -> None:
    """A linear layer makes the positions that a convolution mixes."""
    builder = Builder()
    x = builder.input(random(SAMPLES, 4, 6))
    y = builder.call(aten.linear.default, x, builder.parameter(random(7, 6), "first"))
    builder.call(aten.conv1d.default, y, builder.parameter(random(3, 4, 2), "last"))
    assert find_spaces(builder.build(), builder.parameters) == []


def test_reductions_over_the_channels_leave_them_free() -> None:
    builder = linear_network(lambda b, y: b.call(aten.add.Tensor, y, b.call(aten.sum.dim_IntList, y, [-1], True)))
    assert [sorted(s) for s in find_spaces(builder.build(), builder.parameters)] == [
        [("b", 0), ("first", 0), ("last", 1)]
    ]


def test_a_sum_over_everything_leaves_the_channels_free() -> None:
    builder = linear_network(lambda b, y: b.call(aten.add.Tensor, y, b.call(aten.sum.default, y)))
    assert len(find_spaces(builder.build(), builder.parameters)) == 1


def test_embeddings_make_channels() -> None:
    builder = Builder()
    tokens = builder.input(torch.arange(SAMPLES * 5).view(SAMPLES, 5) % 7)
    y = builder.call(aten.embedding.default, builder.parameter(random(7, 4), "table"), tokens)
    builder.call(aten.linear.default, y, builder.parameter(random(3, 4), "last"))
    assert [sorted(s) for s in find_spaces(builder.build(), builder.parameters)] == [[("last", 1), ("table", 1)]]


def test_channels_of_outputs_are_fixed() -> None:
    network = Network()
    result = network.last(network.first)
    assert network.spaces(result, network.first) == []


def test_both_sides_of_an_addition_move_together() -> None:
    network = Network()
    beside = network.convolution(network.x, "beside", CHANNELS, 2)
    result = network.last(network.call(aten.add.Tensor, network.first, beside))
    (space,) = network.spaces(result)
    assert space == sorted([*BOTH, ("beside.weight", 0), ("beside.bias", 0)])


def test_branches_have_spaces_of_their_own() -> None:
    network = Network()
    middle = network.convolution(network.call(aten.relu.default, network.first), "middle", 5, CHANNELS)
    result = network.convolution(network.call(aten.relu.default, middle), "last", 3, 5)
    found = network.spaces(result)
    assert found == [
        [("first.bias", 0), ("first.weight", 0), ("middle.weight", 1)],
        [("last.weight", 1), ("middle.bias", 0), ("middle.weight", 0)],
    ]


def test_a_tensor_that_is_read_twice_is_fixed() -> None:
    network = Network()
    shared = network.parameter(random(4, 1, 1), "shared")
    scaled = network.call(aten.mul.Tensor, network.call(aten.mul.Tensor, network.first, shared), shared)
    assert network.spaces(network.last(scaled)) == []


def test_names_of_one_memory_are_fixed() -> None:
    network = Network()
    memory = random(4, 1, 1)
    one, other = network.parameter(memory, "one"), network.parameter(memory, "other")
    scaled = network.call(aten.mul.Tensor, network.call(aten.mul.Tensor, network.first, one), other)
    assert network.spaces(network.last(scaled)) == []


def test_a_parameter_that_cannot_be_changed_is_fixed() -> None:
    network = Network()
    scaled = network.call(aten.mul.Tensor, network.first, network.parameter(random(4, 1, 1), "constant"))
    graph = network.build(network.last(scaled))
    tensors = {name: value for name, value in network.parameters.items() if name != "constant"}
    assert find_spaces(graph, tensors) == []
