"""Channels re-ordered before an N:M mask is chosen, so that large weights do not compete within one group of M.

The network's function stays: whatever holds the same channels (the weights that make them, those that read them,
biases, batch norms, a whole residual stream) is re-ordered alike. What belongs together is read from the graph.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from .errors import InputError
from .graph import Graph
from .patterns import NM, Pattern
from .preparation import with_weights

_PARTY = 64  # channels among which all swaps are tried at once: larger parties cost more than they find
_PASS_WORK = 1e9  # comparisons of two weights in one pass: about a second on one CPU core
_PASSES = 32
_LEAST_GAIN = 3e-5  # of the kept magnitude; a pass that gains less is the last
_STARTS, _STARTS_WORK = 8, 2e7  # few channels are searched from several starts, which cost little there
# Of the largest output, by dtype: sums are taken in another order now (on a GPU in TF32 where the dtype is float32).
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class PermutedSpace:
    """Channels that were re-ordered together, for the N:M layers that read them.

    `kept_before` and `kept_after` are the shares of these layers' magnitude that the best masks keep.
    """

    consumers: tuple[str, ...]  # parameter names
    channels: int
    magnitude: float
    kept_before: float
    kept_after: float


@dataclass(frozen=True)
class Permuted:
    """A new model with the same function, and what was gained; the totals are over all spaces."""

    model: nn.Module
    spaces: list[PermutedSpace]

    @property
    def kept_before(self) -> float:
        return sum(space.kept_before * space.magnitude for space in self.spaces) / self._magnitude

    @property
    def kept_after(self) -> float:
        return sum(space.kept_after * space.magnitude for space in self.spaces) / self._magnitude

    @property
    def _magnitude(self) -> float:
        return sum(space.magnitude for space in self.spaces) or 1.0


def permute_channels(
    model: nn.Module,
    graph: Graph,
    patterns: Mapping[str, Pattern],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    seed: int = 0,
) -> Permuted:
    """Re-order channels so that the N:M masks of `patterns` (by parameter name) keep more magnitude.

    The model is left as it is. `args` and `kwargs` are a call with a few samples: the new model must answer it like
    the old one in eval mode, else this raises InputError.
    """
    result = with_weights(model, {})
    tensors = dict([*result.named_parameters(remove_duplicate=False), *result.named_buffers(remove_duplicate=False)])
    generator = torch.Generator().manual_seed(seed)
    spaces = []
    with torch.no_grad():
        expected = _outputs(result, args, kwargs)
        for members in find_spaces(graph, tensors):
            rows, consumers = _rows(members, patterns, tensors)
            if consumers:
                order = best_order(rows, generator)
                spaces.append(_describe(consumers, rows, order))
                for name, axis in members:
                    tensors[name].copy_(tensors[name].index_select(axis, order))
        _compare(result, expected, _outputs(result, args, kwargs))
    return Permuted(result, spaces)


def _describe(consumers: list[str], rows: Rows, order: Tensor) -> PermutedSpace:
    total = sum(float(part.sum()) for part in rows.values())
    kept = [float(kept_magnitude(rows, o).sum()) / (total or 1.0) for o in (order.sort().values, order)]
    return PermutedSpace(tuple(consumers), len(order), total, *kept)


def _outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    modes = [(module, module.training) for module in model.modules()]
    leaves = pytree.tree_leaves(model.eval()(*args, **kwargs))
    for module, training in modes:
        module.training = training
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _compare(model: nn.Module, expected: list[Tensor], given: list[Tensor]) -> None:
    dtypes = {tensor.dtype for tensor in [*model.parameters(), *expected]}
    tolerance = max(_TOLERANCE.get(dtype, 0.0) for dtype in dtypes)
    for a, b in zip(expected, given, strict=True):
        scale = float(a[a.isfinite()].abs().max()) if a.isfinite().any() else 0.0
        if not torch.allclose(a, b, rtol=0, atol=tolerance * scale, equal_nan=True):
            raise InputError(
                f"{type(model).__name__} with its channels re-ordered gives other outputs than before (they differ by "
                f"{float((a - b).abs().max()):.1e}, of {scale:.1e}); leave its channels as they are"
            )


# Which channels belong together.

_FIXED = 0  # the space of everything that has to stay where it is
Axes = dict[int, int]  # axis, counted from the last (-1) -> its space; axes of size 1 have none
Members = list[tuple[str, int]]  # parameters and buffers by name, each with the axis that holds the channels

# Treats all channels alike. Operands are aligned at their last axes.
_ALIKE = (
    "relu", "relu6", "hardtanh", "leaky_relu", "clamp", "clamp_min", "clamp_max", "threshold", "gelu", "silu",
    "hardswish", "hardsigmoid", "sigmoid", "tanh", "elu", "celu", "selu", "mish", "softplus", "log_sigmoid", "add",
    "sub", "rsub", "mul", "div", "neg", "abs", "pow", "sqrt", "rsqrt", "reciprocal", "exp", "log", "maximum", "minimum",
    "layer_norm", "rms_norm", "softmax", "_softmax", "log_softmax", "_log_softmax", "dropout", "clone", "contiguous",
    "alias", "detach", "_to_copy", "to", "lift_fresh_copy", "expand",
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


# The best order of one space.

Rows = dict[NM, Tensor]  # magnitudes that are pruned with one pattern: channels x rows


def _rows(members: Members, patterns: Mapping[str, Pattern], tensors: Mapping[str, Tensor]) -> tuple[Rows, list[str]]:
    """The weights of a space's N:M layers, and their names."""
    parts: dict[NM, list[Tensor]] = {}
    names = []
    for name, axis in members:
        pattern, weight = patterns.get(name), tensors[name]
        if axis == 1 and isinstance(pattern, NM) and pattern.refusal(weight.shape) is None:
            names.append(name)
            wide = weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
            parts.setdefault(pattern, []).append(wide.abs().movedim(1, 0).flatten(1))
    return {pattern: torch.cat(part, 1) for pattern, part in parts.items()}, names


def best_order(rows: Rows, generator: torch.Generator) -> Tensor:
    """The order of channels in which the most magnitude is kept, of those found; never worse than the given one."""
    first = next(iter(rows.values()))
    channels = len(first)
    best = torch.arange(channels, device=first.device)
    most = float(kept_magnitude(rows, best).sum())
    starts = int(_STARTS_WORK / (channels**2 * sum(part.shape[1] for part in rows.values())))
    for start in range(max(1, min(_STARTS, starts))):
        order = torch.randperm(channels, generator=generator).to(best) if start else best
        order = _climb(rows, order, generator)
        kept = float(kept_magnitude(rows, order).sum())
        if kept > most:
            best, most = order, kept
    return best


def kept_magnitude(rows: Rows, order: Tensor) -> Tensor:
    """What the best masks keep in each block of channels: M of them, or what all patterns' M divide."""
    block = math.lcm(*(pattern.m for pattern in rows))
    kept = torch.zeros(len(order) // block, dtype=torch.float64)
    for pattern, part in rows.items():
        groups = part[order].unflatten(0, (-1, pattern.m)).topk(pattern.n, 1).values.sum((1, 2))
        kept += groups.cpu().double().view(-1, block // pattern.m).sum(1)
    return kept


def _climb(rows: Rows, order: Tensor, generator: torch.Generator) -> Tensor:
    """Swap channels of different groups as long as that pays.

    In each pass the blocks meet in parties at random; of the swaps within parties those are taken that gain most, one a
    block, so that each gain is what it would be alone.
    """
    block = math.lcm(*(pattern.m for pattern in rows))
    blocks = len(order) // block
    work = len(order) * sum(part.shape[1] for part in rows.values())
    parties = max(1, blocks // max(2, int(min(_PARTY, _PASS_WORK / work)) // block))
    kept = float(kept_magnitude(rows, order).sum())
    for _ in range(_PASSES):
        order = order.view(blocks, block)[torch.randperm(blocks, generator=generator).to(order)].flatten()
        i, j = _swaps(_gains(rows, order[: blocks // parties * parties * block], parties), block).to(order)
        swapped = order.clone()
        swapped[i], swapped[j] = order[j], order[i]
        touched = torch.cat([i, j]) // block
        after, before = (kept_magnitude(rows, o.view(blocks, block)[touched].flatten()) for o in (swapped, order))
        gain = (after - before).view(2, -1).sum(0)  # measured anew: what is proposed carries rounding
        won = (gain > 0).to(order.device)
        order[i[won]], order[j[won]] = swapped[i[won]], swapped[j[won]]
        gained = float(gain.clamp(min=0).sum())
        kept += gained
        if gained <= _LEAST_GAIN * kept:
            break
    return order


def _gains(rows: Rows, order: Tensor, parties: int) -> Tensor:
    """What swapping any two channels of a party would add to the kept magnitude: parties x channels x channels.

    In a group without its member i, a newcomer of magnitude w adds max(w, bar_i), where bar_i is the N-th largest of
    the others; the member itself adds max(w_i, bar_i). And max(a, b) = (a + b + |a - b|) / 2, whose first two terms
    cancel between the two groups: what is left are sums of |bar_i - w_j|, for which there is a kernel.
    """
    total = torch.zeros((), device=order.device)
    for pattern, part in rows.items():
        n, m = pattern.n, pattern.m
        weights = part[order].unflatten(0, (parties, -1))
        groups = weights.unflatten(1, (-1, m))
        last_kept, first_removed = groups.topk(n + 1, 2).values[:, :, n - 1 :].split(1, 2)
        bar = torch.where(groups >= last_kept, first_removed, last_kept).flatten(1, 2)
        distance = torch.cdist(bar, weights, p=1)
        gain = (distance - distance.diagonal(dim1=1, dim2=2).unsqueeze(2)) / 2
        group = torch.arange(weights.shape[1], device=order.device) // m
        total = total + (gain + gain.mT).masked_fill(group == group.unsqueeze(1), 0)
    return total


def _swaps(gains: Tensor, block: int) -> Tensor:
    """Positions to swap (2 x swaps): the best pairs first, each block in one pair at most."""
    of_blocks = gains.unflatten(2, (-1, block)).unflatten(1, (-1, block)).transpose(2, 3).flatten(3)
    best, pair = of_blocks.max(3)  # parties x blocks x blocks
    party, a, b = torch.nonzero(best.triu() > 0, as_tuple=True)
    ranking = best[party, a, b].argsort(descending=True, stable=True)
    party, a, b, pair = (index[ranking] for index in (party, a, b, pair[party, a, b]))
    first, second = (party * best.shape[1] + side for side in (a, b))
    taken: set[int] = set()
    chosen = []
    for index, both in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        if taken.isdisjoint(both):
            taken.update(both)
            chosen.append(index)
    return torch.stack([first * block + pair // block, second * block + pair % block])[:, chosen]
