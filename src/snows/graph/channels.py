"""Which axes of which parameters hold the same channels, and may be re-ordered together without changing an output."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from .graph import Graph
from .operators import Channels, argument_of, operator_of

_FIXED = 0  # the space of all channels that must stay where they are
Axes = dict[int, int]  # axis, counted from the last (-1) -> its space; axes of size 1 have none
Members = list[tuple[str, int]]  # parameters and buffers by name, each with the axis that holds the channels


def find_spaces(graph: Graph, tensors: Mapping[str, Tensor]) -> list[Members]:
    """Sets of axes: if all axes of a set are re-ordered in the same way, no output changes."""
    walk = _Walk()
    nodes = [n for n in graph.inputs[0].graph.nodes if "parameter" in n.meta or "position" in n.meta]  # not the dead
    for node in [*graph.inputs, *nodes]:
        walk.visit(node)
    walk.fix(*graph.outputs)
    own = {node: node.meta["parameter"] for node in nodes if node.op == "placeholder"}
    memory = {node: tensors[name].untyped_storage().data_ptr() for node, name in own.items() if name in tensors}
    reads = Counter(place for node, place in memory.items() for user in node.users if user in walk.axes)
    walk.fix(*(node for node in own if node not in memory or reads[memory[node]] > 1))  # used in two places
    found: dict[int, Members] = {}
    for node in memory:
        for axis, space in walk.axes[node].items():
            found.setdefault(walk.root(space), []).append((own[node], axis + tensors[own[node]].ndim))
    found.pop(_FIXED, None)
    return list(found.values())


class _Walk:
    """Gives every axis of every value its space, operation by operation. Axes in one space are re-ordered together."""

    def __init__(self) -> None:
        self.axes: dict[Node, Axes] = {}
        self._parent = [_FIXED]
        self._rules: dict[Channels, Callable[[Node], Axes]] = {
            Channels.FIXED: self._fixed,
            Channels.SAME: self._same,
            Channels.LAYER: self._layer,
            Channels.RESHAPE: self._reshape,
            Channels.PERMUTE: self._permute,
            Channels.REDUCE: self._reduce,
            Channels.PICK: self._pick,
            Channels.CAT: self._cat,
            Channels.WINDOW: self._window,
            Channels.PAD: self._pad,
            Channels.PRELU: self._prelu,
            Channels.EMBEDDING: self._embedding,
            Channels.ITEM: self._item,
        }

    def visit(self, node: Node) -> None:
        sizes = _sizes(node)
        axes: Axes = {}
        if node.op == "call_function" and _value(node) is not None:  # not a size
            axes = self._rules[operator_of(node).channels](node)
        elif "parameter" in node.meta:
            axes = {axis: self._new() for axis in range(-len(sizes), 0)}
        self.axes[node] = {axis: axes.get(axis, _FIXED) for axis in range(-len(sizes), 0) if sizes[axis] != 1}

    def fix(self, *nodes: Node) -> None:
        for node in nodes:
            self._unite(_FIXED, *self.axes[node].values())

    def root(self, space: int) -> int:
        while self._parent[space] != space:
            space = self._parent[space]
        return space

    def _new(self) -> int:
        self._parent.append(len(self._parent))
        return self._parent[-1]

    def _unite(self, *spaces: int | None) -> int | None:
        """Make these spaces one. The lowest number stands for all, so what is fixed stays fixed."""
        roots = [self.root(space) for space in spaces if space is not None]
        for root in roots:
            self._parent[root] = min(roots)
        return min(roots, default=None)

    def _fixed(self, node: Node) -> Axes:
        self.fix(*node.all_input_nodes)
        return {}

    def _item(self, node: Node) -> Axes:
        return self.axes[argument_of(node, 0)]

    def _same(self, node: Node) -> Axes:
        axes: Axes = {}
        for operand in node.all_input_nodes:
            for axis, space in self.axes[operand].items():
                self._unite(axes.setdefault(axis, space), space)
        return axes

    def _layer(self, node: Node) -> Axes:
        """A convolution or linear layer: its weight reads one space and makes a new one."""
        source, kernel, bias = (argument_of(node, i, name) for i, name in enumerate(("input", "weight", "bias")))
        x, weight, shape = self.axes[source], self.axes[kernel], _sizes(kernel)
        if len(shape) < 2:
            return self._fixed(node)
        makes, reads = -len(shape), 1 - len(shape)  # axes of the weight; input and output have theirs at `reads`
        others = {axis: space for axis, space in x.items() if axis != reads}
        if len(shape) > 2:  # positions are mixed
            window = [space for axis, space in weight.items() if axis > reads]
            self._unite(_FIXED, *others.values(), *window)
        groups = argument_of(node, 6, "groups", 1)
        if groups == 1:
            self._unite(x.get(reads), weight.get(reads))
            made = weight.get(makes)
        elif shape[:2] == [groups, 1]:  # depthwise: every channel by itself
            made = self._unite(x.get(reads), weight.get(makes))
        else:
            made = self._unite(_FIXED, x.get(reads), weight.get(reads), weight.get(makes))
        if bias is not None:
            made = self._unite(made, self.axes[bias].get(-1))
        return others if made is None else others | {reads: made}

    def _reshape(self, node: Node) -> Axes:
        """An axis survives if the output has one of its size with as many elements behind each index."""
        source = argument_of(node, 0)
        before, after = _sizes(source), _sizes(node)
        places = {(after[axis], math.prod(after[len(after) + axis + 1 :])): axis for axis in range(-len(after), 0)}
        axes: Axes = {}
        for axis, space in self.axes[source].items():
            place = places.get((before[axis], math.prod(before[len(before) + axis + 1 :])))
            if place is None:
                self._unite(_FIXED, space)
            else:
                axes[place] = space
        return axes

    def _permute(self, node: Node) -> Axes:
        rank = len(_sizes(node))
        order = list(range(rank))
        if len(node.args) == 2:
            order = [axis % rank for axis in argument_of(node, 1)]
        else:
            a, b = argument_of(node, 1, "dim0", 0) % rank, argument_of(node, 2, "dim1", 1) % rank
            order[a], order[b] = b, a
        return _arranged(self.axes[argument_of(node, 0)], [axis - rank for axis in order])

    def _reduce(self, node: Node) -> Axes:
        """A reduction over all channels is the same in any order of the channels."""
        source = argument_of(node, 0)
        rank = len(_sizes(source))
        gone = {axis % rank - rank for axis in argument_of(node, 1, "dim") or range(rank)}
        axes = {axis: space for axis, space in self.axes[source].items() if axis not in gone}
        keeps = argument_of(node, 2, "keepdim", False)
        return _arranged(axes, [axis for axis in range(-rank, 0) if keeps or axis not in gone])

    def _pick(self, node: Node) -> Axes:
        source = argument_of(node, 0)
        rank = len(_sizes(source))
        cut = argument_of(node, 1, "dim", 0) % rank - rank
        self._unite(_FIXED, self.axes[source].get(cut))
        whole = len(_sizes(node)) == rank
        return _arranged(self.axes[source], [axis for axis in range(-rank, 0) if whole or axis != cut])

    def _cat(self, node: Node) -> Axes:
        axes = self._same(node)
        rank = len(_sizes(node))
        self._unite(_FIXED, axes.get(argument_of(node, 1, "dim", 0) % rank - rank))
        return axes

    def _window(self, node: Node) -> Axes:
        return self._without_last(node, operator_of(node).window_axes)

    def _pad(self, node: Node) -> Axes:
        return self._without_last(node, len(argument_of(node, 1)) // 2)

    def _without_last(self, node: Node, mixed: int) -> Axes:
        """The axes of the input; those that are mixed, the last ones, are fixed."""
        axes = self.axes[argument_of(node, 0)]
        self._unite(_FIXED, *(space for axis, space in axes.items() if axis >= -mixed))
        return axes

    def _prelu(self, node: Node) -> Axes:
        axes = self.axes[argument_of(node, 0)]
        slopes = self.axes[argument_of(node, 1)]
        if slopes:  # one for each channel; channels are at axis 1
            self._unite(slopes[-1], axes.get(1 - len(_sizes(node)), _FIXED))
        return axes

    def _embedding(self, node: Node) -> Axes:
        table = self.axes[argument_of(node, 0)]
        self.fix(argument_of(node, 1))
        self._unite(_FIXED, table.get(-2))
        return {-1: table.get(-1, _FIXED)}


def _sizes(node: Node) -> list[float]:
    """The sizes of a node's first tensor. NaN stands for the number of samples, so that it equals no size."""
    value = _value(node)
    return [] if value is None else [size if isinstance(size, int) else math.nan for size in value.shape]


def _value(node: Node) -> Tensor | None:
    return next((leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)), None)


def _arranged(axes: Axes, order: list[int]) -> Axes:
    return {place - len(order): axes[axis] for place, axis in enumerate(order) if axis in axes}
