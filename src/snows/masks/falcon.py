"""FALCON (Meng et al. 2024): a budget of weights and one of multiplications together, then CHITA on the support.

The support keeps as much squared weight as both budgets allow. Its dual has two prices, one for a weight and one for a
multiplication: a weight stays if its square is worth its price.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..patterns.base import Unstructured, ranks_within
from . import Choice, Network, best_masks, require_unstructured
from .chita import CHITA

_HALVINGS = 60


@dataclass(frozen=True)
class FALCON:
    flops: float | None = None  # the share of multiplications removed, beside the pattern's share of weights
    solver: CHITA = field(default_factory=CHITA)  # for the weights on that support

    def __post_init__(self) -> None:
        if self.flops is not None and not 0 < self.flops < 1:
            raise ArgumentError(f"FALCON: flops is {self.flops}; expected the share removed, between 0 and 1")

    def choose(self, network: Network) -> Choice:
        require_unstructured(self, network.patterns)
        squares = {name: w.double().square() for name, w in network.weights.items()}
        if self.flops is None:
            masks = best_masks(squares, network.patterns)
        else:
            masks = self._under_both_budgets(squares, network)
        # multiplications are counted by layer: with a budget of them, each layer keeps its number of weights
        return self.solver.solve_on(masks, network, between_layers=self.flops is None)

    def _under_both_budgets(self, squares: dict[str, Tensor], network: Network) -> dict[str, Tensor]:
        patterns = set(network.patterns.values())
        pattern = next(iter(patterns))
        if len(patterns) != 1 or not isinstance(pattern, Unstructured) or pattern.spread != "global":
            raise ArgumentError("FALCON with a budget of flops takes one sparsity for all layers, such as 0.7")
        layers = [s.flatten() for s in squares.values()]
        value = torch.cat(layers)
        cost = torch.cat([torch.full_like(s.flatten(), network.uses[name]) for name, s in squares.items()])
        assert self.flops is not None
        count = len(value) - round(pattern.sparsity * len(value))
        work = (1 - self.flops) * float(cost.sum())
        # Unless told, a layer's bound is that of the harder of both budgets.
        bounding = pattern if pattern.most is not None else replace(pattern, sparsity=max(pattern.sparsity, self.flops))
        ranks = torch.cat([ranks_within(layer, *bounding.bounds(len(layer))) for layer in layers])
        kept = two_budgets(value, cost, count, work, ranks)
        if int(kept.sum()) < count:
            if pattern.most is not None:
                raise ArgumentError(
                    f"FALCON: {self.flops:.0%} fewer multiplications cannot be had at a sparsity of "
                    f"{pattern.sparsity:g} where no layer loses more than {pattern.most:.0%} (max={pattern.most:g}); "
                    "lower flops, or raise max or the sparsity"
                )
            kept = two_budgets(value, cost, count, work, ranks.clamp(max=0))  # which the budgets come before
        parts = kept.split([len(layer) for layer in layers])
        return {name: part.view_as(s) for (name, s), part in zip(squares.items(), parts, strict=True)}


def two_budgets(value: Tensor, cost: Tensor, count: int, work: float, ranks: Tensor | None = None) -> Tensor:
    """The `count` entries with the largest sum of values whose costs sum to `work` at most. Where entries have ranks,
    those of a higher one come first, whatever their values.

    At a price for work the best entries have the largest value less price times cost; a higher price gives cheaper
    ones. The lowest price at which they fit minimizes the dual, and is off the best choice by one exchange of entries.
    """
    low, high = 0.0, _highest_price(value, cost)

    def best_at(price: float) -> Tensor:
        return _best(value - price * cost, count, ranks)

    best = best_at(low)
    if float(cost[best].sum()) > work:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            fits = float(cost[best_at(middle)].sum()) <= work
            low, high = (low, middle) if fits else (middle, high)
        best = best_at(high)
        best = best[cost[best].cumsum(0) <= work]  # all of them, unless even the cheapest are too many
    kept = torch.zeros_like(value, dtype=torch.bool)
    kept[best] = True
    return kept


def _best(value: Tensor, count: int, ranks: Tensor | None) -> Tensor:
    order = value.argsort(descending=True, stable=True)
    if ranks is not None:
        order = order[ranks[order].argsort(descending=True, stable=True)]
    return order[:count]


def _highest_price(value: Tensor, cost: Tensor) -> float:
    """One at which a cheaper entry is always better."""
    steps = cost.unique().diff()
    return 2 * float(value.max() / steps.min()) if len(steps) else 0.0
