"""Channels re-ordered before an N:M mask is chosen, so that fewer large weights compete within one group of M.

The network computes what it did: all tensors that hold the same channels (the weights that make them, those that read
them, biases, batch norms, a whole residual stream) are re-ordered together. The graph shows which these are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import InputError
from ..graph import Graph
from ..graph.channels import Members, find_spaces
from .base import Group, Pattern

_PARTY = 64  # channels among which all swaps are tried at once: larger parties cost more than they gain
_PASS_WORK = 1e9  # comparisons of two weights in one pass: about a second on one CPU core
_PASSES = 32
_LEAST_GAIN = 3e-5  # of the kept magnitude; a pass that gains less is the last
_STARTS, _STARTS_WORK = 8, 2e7  # few channels are searched from several starts, which cost little there
# Relative to the largest output. Sums are taken in another order (on a GPU in TF32 if the dtype is float32).
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}

Rows = dict[Group, Tensor]  # magnitudes of the weights that are pruned in such groups: channels x rows


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
    """A model with re-ordered channels, and what that gained. The totals are over all spaces."""

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
    """Re-order the model's channels in place, so that the N:M masks of `patterns` keep more magnitude.

    `patterns` are by parameter name. `args` and `kwargs` are a call with a few samples.

    Raises:
        InputError: If the model answers this call (in eval mode) otherwise than before. It is then of no more use.
    """
    tensors = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    generator = torch.Generator().manual_seed(seed)
    spaces = []
    with torch.no_grad():
        expected = _outputs(model, args, kwargs)
        for members in find_spaces(graph, tensors):
            rows, consumers = _rows(members, patterns, tensors)
            if consumers:
                order = best_order(rows, generator)
                spaces.append(_describe(consumers, rows, order))
                for name, axis in members:
                    tensors[name].copy_(tensors[name].index_select(axis, order))
        _compare(model, expected, _outputs(model, args, kwargs))
    return Permuted(model, spaces)


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


def _compare(model: nn.Module, expected: list[Tensor], outputs: list[Tensor]) -> None:
    dtypes = {tensor.dtype for tensor in [*model.parameters(), *expected]}
    tolerance = max(_TOLERANCE.get(dtype, 0.0) for dtype in dtypes)
    for a, b in zip(expected, outputs, strict=True):
        scale = float(a[a.isfinite()].abs().max()) if a.isfinite().any() else 0.0
        if not torch.allclose(a, b, rtol=0, atol=tolerance * scale, equal_nan=True):
            raise InputError(
                f"{type(model).__name__} with its channels re-ordered gives other outputs than before (they differ by "
                f"{float((a - b).abs().max()):.1e}, of {scale:.1e}); leave its channels as they are"
            )


def _rows(members: Members, patterns: Mapping[str, Pattern], tensors: Mapping[str, Tensor]) -> tuple[Rows, list[str]]:
    """The magnitudes of the N:M layers that read the channels of a space, and these layers' names."""
    parts: dict[Group, list[Tensor]] = {}
    names = []
    for name, axis in members:
        pattern, weight = patterns.get(name), tensors[name]
        if axis != 1 or pattern is None or pattern.group is None or pattern.refusal(weight.shape) is not None:
            continue
        names.append(name)
        wide = weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
        parts.setdefault(pattern.group, []).append(wide.abs().movedim(1, 0).flatten(1))
    return {group: torch.cat(part, 1) for group, part in parts.items()}, names


def best_order(rows: Rows, generator: torch.Generator) -> Tensor:
    """The best order of channels that was found: it keeps the most magnitude, and never less than the present one."""
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
    """What the best masks keep in each block of channels."""
    block = _block(rows)
    kept = torch.zeros(len(order) // block, dtype=torch.float64)
    for group, part in rows.items():
        sums = part[order].unflatten(0, (-1, group.size)).topk(group.kept, 1).values.sum((1, 2))
        kept += sums.cpu().double().view(-1, block // group.size).sum(1)
    return kept


def _block(rows: Rows) -> int:
    """How many channels hold whole groups of every pattern."""
    return math.lcm(*(group.size for group in rows))


def _climb(rows: Rows, order: Tensor, generator: torch.Generator) -> Tensor:
    """Swap channels of different blocks as long as that gains enough.

    In each pass the blocks meet in random parties. Of the swaps within parties, those that gain most are made, at most
    one for each block, so that each gains what it would gain alone.
    """
    block = _block(rows)
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
        gain = (after - before).view(2, -1).sum(0)  # measured again, since the proposed gains carry rounding
        won = (gain > 0).to(order.device)
        order[i[won]], order[j[won]] = swapped[i[won]], swapped[j[won]]
        gained = float(gain.clamp(min=0).sum())
        kept += gained
        if gained <= _LEAST_GAIN * kept:
            break
    return order


def _gains(rows: Rows, order: Tensor, parties: int) -> Tensor:
    """What swapping any two channels of a party would add to the kept magnitude: parties x channels x channels.

    In a group without its member i, a new channel of magnitude w adds max(w, bar_i), where bar_i is the N-th largest of
    the others; the member itself adds max(w_i, bar_i). Since max(a, b) = (a + b + |a - b|) / 2 and the first two terms
    cancel between the two groups, only sums of |bar_i - w_j| remain, which `cdist` computes.
    """
    total = torch.zeros((), device=order.device)
    for (size, kept), part in rows.items():
        weights = part[order].unflatten(0, (parties, -1))
        groups = weights.unflatten(1, (-1, size))
        last_kept, first_removed = groups.topk(kept + 1, 2).values[:, :, kept - 1 :].split(1, 2)
        bar = torch.where(groups >= last_kept, first_removed, last_kept).flatten(1, 2)
        distance = torch.cdist(bar, weights, p=1)
        gain = (distance - distance.diagonal(dim1=1, dim2=2).unsqueeze(2)) / 2
        member_of = torch.arange(weights.shape[1], device=order.device) // size
        total = total + (gain + gain.mT).masked_fill(member_of == member_of.unsqueeze(1), 0)
    return total


def _swaps(gains: Tensor, block: int) -> Tensor:
    """Positions to swap (2 x swaps): the best pairs first, each block in at most one pair."""
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
