"""Which channels belong together: axes of parameters that may be re-ordered alike without changing an output."""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from .graph import Graph

_FIXED = 0  # the space of everything that has to stay where it is
Axes = dict[int, int]  # axis, counted from the last (-1) -> its space; axes of size 1 have none
Members = list[tuple[str, int]]  # parameters and buffers by name, each with the axis that holds the channels

# Treats all channels alike. Operands are aligned at their last axes.
_ALIKE = (
    "relu", "relu6", "hardtanh", "leaky_relu", "clamp", "clamp_min", "clamp_max", "threshold", "gelu", "silu",
    "hardswish", "hardsigmoid", "sigmoid", "tanh", "elu", "celu", "selu", "mish", "softplus", "log_sigmoid", "add",
    "sub", "rsub", "mul", "addcmul", "div", "neg", "abs", "pow", "sqrt", "rsqrt", "reciprocal", "exp", "log",
    "maximum", "minimum", "layer_norm", "rms_norm", "softmax", "_softmax", "log_softmax", "_log_softmax", "dropout",
    "clone", "contiguous", "alias", "detach", "_to_copy", "to", "lift_fresh_copy", "expand",
)  # fmt: skip
_SPATIAL = re.compile(  # the number says how many of the last axes are mixed
    r"_?(?:max_pool|avg_pool|adaptive_avg_pool|adaptive_max_pool|upsample_[a-z_]+|reflection_pad|replication_pad)"
    r"([123])d(?:_with_indices)?"
)


def find_spaces(graph: Graph, tensors: Mapping[str, Tensor]) -> list[Members]:
    """What may be re-ordered without changing an output, all members of a space alike."""
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
    """The space of every axis of every value, operation by operation. What no rule speaks of is fixed."""

    def __init__(self) -> None:
        self.axes: dict[Node, Axes] = {}
        self._parent = [_FIXED]
        self._rules: dict[str, Callable[[Node], Axes]] = {
            **dict.fromkeys(_ALIKE, self._alike),
            **dict.fromkeys(("conv1d", "conv2d", "conv3d", "linear"), self._layer),
            **dict.fromkeys(("view", "_unsafe_view", "reshape", "flatten", "squeeze", "unsqueeze"), self._reshape),
            **dict.fromkeys(("permute", "transpose", "t"), self._permute),
            **dict.fromkeys(("mean", "sum", "amax"), self._reduce),
            **dict.fromkeys(("select", "slice"), self._pick),
            **dict.fromkeys(("pad", "constant_pad_nd"), self._pad),
            "cat": self._cat,
            "prelu": self._prelu,
            "embedding": self._embedding,
        }

    def visit(self, node: Node) -> None:
        sizes = _sizes(node)
        axes: Axes = {}
        if node.op == "call_function" and _value(node) is not None:  # not a size
            axes = self._find(node)
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
        """One space of those given. The lowest number stands for all, so what is fixed stays so."""
        roots = [self.root(space) for space in spaces if space is not None]
        for root in roots:
            self._parent[root] = min(roots)
        return min(roots, default=None)

    def _find(self, node: Node) -> Axes:
        if node.target is operator.getitem:
            return self.axes[_argument(node, 0)]
        name = ""
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
            name = node.target.overloadpacket.__name__
        if spatial := _SPATIAL.fullmatch(name):
            return self._spatial(node, int(spatial[1]))
        return self._rules.get(name, self._unknown)(node)

    def _unknown(self, node: Node) -> Axes:
        self.fix(*node.all_input_nodes)
        return {}

    def _alike(self, node: Node) -> Axes:
        axes: Axes = {}
        for operand in node.all_input_nodes:
            for axis, space in self.axes[operand].items():
                self._unite(axes.setdefault(axis, space), space)
        return axes

    def _layer(self, node: Node) -> Axes:
        """A convolution or linear layer: its weight reads one space and makes another."""
        source, kernel, bias = (_argument(node, i, name) for i, name in enumerate(("input", "weight", "bias")))
        x, weight, shape = self.axes[source], self.axes[kernel], _sizes(kernel)
        if len(shape) < 2:
            return self._unknown(node)
        makes, reads = -len(shape), 1 - len(shape)  # axes of the weight; input and output have theirs at `reads`
        others = {axis: space for axis, space in x.items() if axis != reads}
        if len(shape) > 2:  # positions are mixed
            window = [space for axis, space in weight.items() if axis > reads]
            self._unite(_FIXED, *others.values(), *window)
        groups = _argument(node, 6, "groups", 1)
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
        """An axis is still there if one of its size has as many elements behind each index as before."""
        source = _argument(node, 0)
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
            order = [axis % rank for axis in _argument(node, 1)]
        else:
            a, b = _argument(node, 1, "dim0", 0) % rank, _argument(node, 2, "dim1", 1) % rank
            order[a], order[b] = b, a
        return _arranged(self.axes[_argument(node, 0)], [axis - rank for axis in order])

    def _reduce(self, node: Node) -> Axes:
        """What is taken of all channels together is the same in any order of theirs."""
        source = _argument(node, 0)
        rank = len(_sizes(source))
        gone = {axis % rank - rank for axis in _argument(node, 1, "dim") or range(rank)}
        axes = {axis: space for axis, space in self.axes[source].items() if axis not in gone}
        keeps = _argument(node, 2, "keepdim", False)
        return _arranged(axes, [axis for axis in range(-rank, 0) if keeps or axis not in gone])

    def _pick(self, node: Node) -> Axes:
        source = _argument(node, 0)
        rank = len(_sizes(source))
        cut = _argument(node, 1, "dim", 0) % rank - rank
        self._unite(_FIXED, self.axes[source].get(cut))
        whole = len(_sizes(node)) == rank
        return _arranged(self.axes[source], [axis for axis in range(-rank, 0) if whole or axis != cut])

    def _cat(self, node: Node) -> Axes:
        axes = self._alike(node)
        rank = len(_sizes(node))
        self._unite(_FIXED, axes.get(_argument(node, 1, "dim", 0) % rank - rank))
        return axes

    def _spatial(self, node: Node, dimensions: int) -> Axes:
        axes = self.axes[_argument(node, 0)]
        self._unite(_FIXED, *(space for axis, space in axes.items() if axis >= -dimensions))
        return axes

    def _pad(self, node: Node) -> Axes:
        return self._spatial(node, len(_argument(node, 1)) // 2)

    def _prelu(self, node: Node) -> Axes:
        axes = self.axes[_argument(node, 0)]
        slopes = self.axes[_argument(node, 1)]
        if slopes:  # one for each channel, and channels are at axis 1
            self._unite(slopes[-1], axes.get(1 - len(_sizes(node)), _FIXED))
        return axes

    def _embedding(self, node: Node) -> Axes:
        table = self.axes[_argument(node, 0)]
        self.fix(_argument(node, 1))
        self._unite(_FIXED, table.get(-2))
        return {-1: table.get(-1, _FIXED)}


def _argument(node: Node, position: int, name: str = "", default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _sizes(node: Node) -> list[float]:
    """Of a node's first tensor. The number of samples is no number, so that it equals nothing, itself included."""
    value = _value(node)
    return [] if value is None else [size if isinstance(size, int) else math.nan for size in value.shape]


def _value(node: Node) -> Tensor | None:
    return next((leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)), None)


def _arranged(axes: Axes, order: list[int]) -> Axes:
    return {place - len(order): axes[axis] for place, axis in enumerate(order) if axis in axes}
