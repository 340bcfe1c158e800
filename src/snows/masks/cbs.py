"""CBS (Yu et al. 2022): the weights whose joint removal the quadratic model likes best, then their joint update.

The removed set P costs w_P' F_PP w_P with F = G'G / N block-diagonal by layer, so with u = G_P w_P it costs |u|^2 / N:
only products with G are needed, and swaps of one weight for another are priced exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..patterns.base import NM
from . import Choice, Network, best_masks, require_unstructured
from .fisher import joint_update, slices

_CHUNKS = 1000


@dataclass(frozen=True)
class CBS:
    gradients: int = 1000
    damping: float = 1e-5  # of the update
    block: int = 2000  # of the update
    tries: int = 50  # random magnitude masks to start from
    passes: int = 100  # of swaps
    least_gain: float = 1e-4
    reach: int = 10  # ranks to either side that a partner is looked for
    misses: int = 20  # in a row, before a pass ends
    patience: int = 5  # passes without a new best loss

    def choose(self, network: Network) -> Choice:
        require_unstructured(self, network.patterns)
        masks = self._swap(network, self._start(network))
        weights = {name: self._update(network, name, masks[name], g) for name, g in network.gradients(self.gradients)}
        return Choice(masks, weights)

    def _start(self, network: Network) -> dict[str, Tensor]:
        """The best of several random magnitude masks (the largest of each random chunk); plain magnitude is one."""
        magnitudes = {name: w.abs() for name, w in network.weights.items()}
        best = best_masks(magnitudes, network.patterns)
        best_loss = _loss(network, best)
        generator = torch.Generator().manual_seed(network.seed)
        for _ in range(self.tries - 1):
            ranks = _ranks_in_chunks(magnitudes, generator)
            masks = best_masks(ranks, network.patterns)
            loss = _loss(network, masks)
            if loss < best_loss:
                best, best_loss = masks, loss
        return best

    def _swap(self, network: Network, masks: dict[str, Tensor]) -> dict[str, Tensor]:
        """Passes of swaps while the model finds some; the masks with the least loss on the way."""
        state = _Swaps(network, masks, self.gradients)
        best, best_loss, waited = masks, _loss(network, masks), 0
        for _ in range(self.passes):
            if not self._one_pass(state):
                break
            masks = state.masks()
            loss = _loss(network, masks)
            waited = 0 if loss < best_loss else waited + 1
            if loss < best_loss:
                best, best_loss = masks, loss
            if waited == self.patience:
                break
        return best

    def _one_pass(self, state: _Swaps) -> int:
        """From the most to the least costly removed weight, look for a kept one near its rank to remove instead."""
        removed, kept = state.ranked()
        misses = swaps = 0
        used: set[int] = set()
        for rank, i in enumerate(removed):
            first = max(0, rank - self.reach)
            near = [j for j in kept[first : rank + self.reach + 1] if j not in used]
            gains = state.gains(i, near)
            found = next((k for k, gain in enumerate(gains) if gain >= self.least_gain), None)
            if found is None:
                misses += 1
                if misses == self.misses or (rank == 0 and not swaps):
                    break
                continue
            state.swap(i, near[found])
            used.add(near[found])
            swaps, misses = swaps + 1, 0
        return swaps

    def _update(self, network: Network, name: str, mask: Tensor, gradients: Tensor) -> Tensor:
        weight, kept = network.weights[name].flatten(), mask.flatten()
        parts = [
            joint_update(gradients[:, part], weight[part], kept[part], self.damping)
            for part in slices(len(weight), self.block)
        ]
        return torch.cat(parts).view_as(mask).to(weight.dtype)


class _Swaps:
    """The removed set, with u = G_P w_P of each layer. Weights are numbered through all layers."""

    def __init__(self, network: Network, masks: dict[str, Tensor], gradients: int) -> None:
        self.shapes = {name: mask.shape for name, mask in masks.items()}
        self.kept = torch.cat([mask.flatten() for mask in masks.values()])
        self.weight = torch.cat([network.weights[name].flatten().double() for name in masks])
        pairs = dict(network.gradients(gradients))
        self.columns = torch.cat([pairs[name].T for name in masks])  # a weight's gradients lie side by side
        self.count = self.columns.shape[1]
        self.layer = torch.cat([torch.full((mask.numel(),), i) for i, mask in enumerate(masks.values())])
        self.layer = self.layer.to(self.kept.device)
        self.edges = [0, *torch.tensor([mask.numel() for mask in masks.values()]).cumsum(0).tolist()]
        self.group = self._comparable(network, list(masks))
        self.gone = torch.tensor([int((~mask).sum()) for mask in masks.values()], device=self.kept.device)
        self.least, self.most = self._bounds(network)
        self.u = torch.stack([self._removed_sum(part) for part in self._layers()])

    def masks(self) -> dict[str, Tensor]:
        parts = [self.kept[part].view(shape) for part, shape in zip(self._layers(), self.shapes.values(), strict=True)]
        return {name: part.clone() for name, part in zip(self.shapes, parts, strict=True)}

    def ranked(self) -> tuple[list[int], list[int]]:
        """Removed weights, the most costly first; kept ones, the cheapest to remove first."""
        own = self.weight.square() * self._own()
        cross = 2 * self.weight * self._cross()
        cost = torch.where(self.kept, cross + own, cross - own)
        removed, kept = (~self.kept).nonzero().flatten(), self.kept.nonzero().flatten()
        limit = 20_000  # passes end far earlier
        return (
            removed[cost[removed].argsort(descending=True)][:limit].tolist(),
            kept[cost[kept].argsort()][:limit].tolist(),
        )

    def gains(self, i: int, partners: list[int]) -> list[float]:
        """By how much the model's cost falls if i comes back and each partner goes instead (-inf: not allowed)."""
        if not partners:
            return []
        j = torch.tensor(partners, device=self.kept.device)
        mine, theirs = self.columns[i].double(), self.columns[j].double()
        w_i, w_j = self.weight[i], self.weight[j]
        back = 2 * w_i * (mine @ self.u[self.layer[i]]) - (w_i * mine).square().sum()
        gone = 2 * w_j * (theirs * self.u[self.layer[j]]).sum(1) + (w_j[:, None] * theirs).square().sum(1)
        here, there = self.layer[i], self.layer[j]
        both = torch.where(there == here, 2 * w_i * w_j * (theirs @ mine), torch.zeros_like(w_j))
        gain = (back - gone + both) / self.count
        room = (self.gone[here] > self.least[here]) & (self.gone[there] < self.most[there])
        allowed = (self.group[j] == self.group[i]) & ((there == here) | room)
        result: list[float] = torch.where(allowed, gain, torch.full_like(gain, -math.inf)).tolist()
        return result

    def swap(self, i: int, j: int) -> None:
        self.u[self.layer[i]] -= self.weight[i] * self.columns[i].double()
        self.u[self.layer[j]] += self.weight[j] * self.columns[j].double()
        self.kept[i], self.kept[j] = True, False
        self.gone[self.layer[i]] -= 1
        self.gone[self.layer[j]] += 1

    def _comparable(self, network: Network, names: list[str]) -> Tensor:
        """Weights may be swapped within layers, and between layers whose pattern is spread over all of them."""
        groups: dict[object, int] = {}
        numbers = []
        for name in names:
            pattern = network.patterns[name]
            key = pattern if getattr(pattern, "spread", None) == "global" else name
            numbers.append(groups.setdefault(key, len(groups)))
        return torch.tensor(numbers, device=self.kept.device)[self.layer]

    def _bounds(self, network: Network) -> Tensor:
        """How many of each layer may be removed: at least, and at most."""
        sizes = {name: shape.numel() for name, shape in self.shapes.items()}
        patterns = [(network.patterns[name], size) for name, size in sizes.items()]
        bounds = [pattern.bounds(size) for pattern, size in patterns if not isinstance(pattern, NM)]
        return torch.tensor(bounds, device=self.kept.device).T

    def _layers(self) -> Iterator[slice]:
        return (slice(a, b) for a, b in pairwise(self.edges))

    def _removed_sum(self, part: slice) -> Tensor:
        gone = (self.weight[part] * ~self.kept[part]).to(self.columns.dtype)
        return (self.columns[part].T @ gone).double()

    def _cross(self) -> Tensor:
        """For each weight, its row of F times the removed weights of its layer."""
        parts = [self.columns[part] @ u.to(self.columns.dtype) for part, u in zip(self._layers(), self.u, strict=True)]
        return torch.cat(parts).double() / self.count

    def _own(self) -> Tensor:
        return torch.cat([self.columns[part].square().mean(1) for part in self._layers()]).double()


def _loss(network: Network, masks: dict[str, Tensor]) -> float:
    return network.loss({name: network.weights[name] * mask for name, mask in masks.items()})


def _ranks_in_chunks(magnitudes: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Scores by which the best of all are the best of each random chunk: a weight's rank within its chunk."""
    flat = torch.cat([m.flatten() for m in magnitudes.values()])
    count = max(1, min(math.isqrt(len(flat)), _CHUNKS))
    width = -(-len(flat) // count)
    shuffled = torch.randperm(len(flat), generator=generator).to(flat.device)
    padded = torch.full((count * width,), math.inf, dtype=flat.dtype, device=flat.device)
    padded[: len(flat)] = flat[shuffled]
    ranks = padded.view(count, width).argsort(dim=1).argsort(dim=1).flatten()[: len(flat)]
    score = torch.empty_like(flat)
    score[shuffled] = ranks.to(flat.dtype)
    parts = score.split([m.numel() for m in magnitudes.values()])
    return {name: part.view_as(m) for (name, m), part in zip(magnitudes.items(), parts, strict=True)}
