"""CBS: the weights whose joint removal a quadratic model of the loss likes best, and their joint update.

The removed set P costs w_P' F_PP w_P with F = G'G / N block-diagonal by layer, so with u = G_P w_P it costs |u|^2 / N:
only products with G are needed, and swapping one weight for another has an exact price.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from .base import Choice, Network, Takes, best_masks, require_pattern
from .fisher import joint_update, slices

_CHUNKS = 1000
_RANKED = 20_000  # candidates of a pass; passes end far earlier


@dataclass(frozen=True)
class CBS:
    """Swaps removed weights for kept ones while a quadratic model of the loss improves. Unstructured patterns only.

    Yu et al. 2022, "The Combinatorial Brain Surgeon: Pruning Weights That Cancel One Another in Neural Networks".

    Args:
        gradients: How many gradients of single samples the model is made of.
        damping: Added to the diagonal of the Fisher matrix in the final update.
        block: Weights of a layer that are updated together.
        tries: Masks to start from: that of magnitude and random ones near it.
        passes: Passes of swaps, at most.
        least_gain: A swap must lower the modelled loss by at least this much.
        reach: How many ranks to either side a partner for a swap is looked for.
        misses: Failures in a row that end a pass.
        patience: Passes without a new best loss that end the search.

    Example:
        >>> import torch, snows
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
        >>> method = snows.CBS(gradients=32, tries=2, passes=2)
        >>> result = snows.prune(model, torch.randn(64, 8), 0.5, mask=method, layers="0", progress=False)
        >>> int(result.masks["0.weight"].sum())
        16
    """

    gradients: int = 1000
    damping: float = 1e-5
    block: int = 2000
    tries: int = 50
    passes: int = 100
    least_gain: float = 1e-4
    reach: int = 10
    misses: int = 20
    patience: int = 5
    takes: ClassVar[Takes] = "unstructured"

    def choose(self, network: Network) -> Choice:
        require_pattern(self, network.patterns)
        masks = self._swap(network, self._start(network))
        weights = {name: self._update(network, name, masks[name], g) for name, g in network.gradients(self.gradients)}
        return Choice(masks, weights)

    def _start(self, network: Network) -> dict[str, Tensor]:
        """The best of several masks: plain magnitude, and the largest magnitudes of random chunks."""
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
        """The masks with the least loss among those after each pass of swaps."""
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
        """For removed weights, the most costly first, look for a kept one near its rank to remove instead.

        Returns the number of swaps.
        """
        removed, kept = state.ranked()
        misses = swaps = 0
        used: set[int] = set()
        for rank, i in enumerate(removed):
            first = max(0, rank - self.reach)
            near = [j for j in kept[first : rank + self.reach + 1] if j not in used]
            gains = zip(near, state.gains(i, near), strict=True)
            partner = next((j for j, gain in gains if gain >= self.least_gain), None)
            if partner is None:
                misses += 1
                if misses == self.misses or rank == 0:
                    break
                continue
            state.swap(i, partner)
            used.add(partner)
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
    """The removed set, with u = G_P w_P of each layer. Weights are numbered consecutively through all layers."""

    def __init__(self, network: Network, masks: dict[str, Tensor], gradients: int) -> None:
        self.shapes = {name: mask.shape for name, mask in masks.items()}
        self.kept = torch.cat([mask.flatten() for mask in masks.values()])
        self.weight = torch.cat([network.weights[name].flatten().double() for name in masks])
        by_layer = dict(network.gradients(gradients))
        self.columns = torch.cat([by_layer[name].T for name in masks])  # the gradients of one weight are one row
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
        return (
            removed[cost[removed].argsort(descending=True)][:_RANKED].tolist(),
            kept[cost[kept].argsort()][:_RANKED].tolist(),
        )

    def gains(self, i: int, partners: list[int]) -> list[float]:
        """How much the cost falls if weight i is kept and each partner removed instead; -inf where not allowed."""
        if not partners:
            return []
        j = torch.tensor(partners, device=self.kept.device)
        mine, theirs = self.columns[i].double(), self.columns[j].double()
        w_i, w_j = self.weight[i], self.weight[j]
        saved = 2 * w_i * (mine @ self.u[self.layer[i]]) - (w_i * mine).square().sum()
        added = 2 * w_j * (theirs * self.u[self.layer[j]]).sum(1) + (w_j[:, None] * theirs).square().sum(1)
        here, there = self.layer[i], self.layer[j]
        both = torch.where(there == here, 2 * w_i * w_j * (theirs @ mine), torch.zeros_like(w_j))
        gain = (saved - added + both) / self.count
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
        """A number for each weight: weights of equal numbers may be swapped, within a layer or among layers that are
        ranked together."""
        groups: dict[object, int] = {}
        numbers = []
        for name in names:
            pattern = network.patterns[name]
            key = pattern if pattern.ranked_together else name
            numbers.append(groups.setdefault(key, len(groups)))
        return torch.tensor(numbers, device=self.kept.device)[self.layer]

    def _bounds(self, network: Network) -> Tensor:
        """How many of each layer may be removed: at least, and at most."""
        bounds = [network.patterns[name].bounds(shape.numel()) for name, shape in self.shapes.items()]
        return torch.tensor(bounds, device=self.kept.device).T

    def _layers(self) -> Iterator[slice]:
        return (slice(a, b) for a, b in pairwise(self.edges))

    def _removed_sum(self, part: slice) -> Tensor:
        removed = (self.weight[part] * ~self.kept[part]).to(self.columns.dtype)
        return (self.columns[part].T @ removed).double()

    def _cross(self) -> Tensor:
        """For each weight, the product of its row of F with the removed weights of its layer."""
        parts = [self.columns[part] @ u.to(self.columns.dtype) for part, u in zip(self._layers(), self.u, strict=True)]
        return torch.cat(parts).double() / self.count

    def _own(self) -> Tensor:
        """The diagonal of F."""
        return torch.cat([self.columns[part].square().mean(1) for part in self._layers()]).double()


def _loss(network: Network, masks: dict[str, Tensor]) -> float:
    return network.loss({name: network.weights[name] * mask for name, mask in masks.items()})


def _ranks_in_chunks(magnitudes: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """A weight's rank within its random chunk, as a score: the best scores are the best of each chunk."""
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
