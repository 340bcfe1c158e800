"""FALCON (Meng et al. 2024): a budget of weights and one of multiplications together, then CHITA on the support.

The support keeps as much squared weight as both budgets allow. Its dual has two prices, one for a weight and one for a
multiplication: a weight stays if its square is worth its price.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..patterns import Unstructured
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
        value = torch.cat([s.flatten() for s in squares.values()])
        cost = torch.cat([torch.full_like(s.flatten(), network.uses[name]) for name, s in squares.items()])
        assert self.flops is not None
        count = len(value) - round(pattern.sparsity * len(value))
        kept = two_budgets(value, cost, count, (1 - self.flops) * float(cost.sum()))
        parts = kept.split([s.numel() for s in squares.values()])
        return {name: part.view_as(s) for (name, s), part in zip(squares.items(), parts, strict=True)}


def two_budgets(value: Tensor, cost: Tensor, count: int, work: float) -> Tensor:
    """The `count` entries with the largest sum of values whose costs sum to `work` at most.

    At a price for work the best entries have the largest value less price times cost; a higher price gives cheaper
    ones. The lowest price at which they fit minimizes the dual, and is off the best choice by one exchange of entries.
    """
    low, high = 0.0, _highest_price(value, cost)
    best = _best_at(low, value, cost, count)
    if float(cost[best].sum()) > work:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            fits = float(cost[_best_at(middle, value, cost, count)].sum()) <= work
            low, high = (low, middle) if fits else (middle, high)
        best = _best_at(high, value, cost, count)
        best = best[cost[best].cumsum(0) <= work]  # all of them, unless even the cheapest are too many
    kept = torch.zeros_like(value, dtype=torch.bool)
    kept[best] = True
    return kept


def _best_at(price: float, value: Tensor, cost: Tensor, count: int) -> Tensor:
    return (value - price * cost).argsort(descending=True, stable=True)[:count]


def _highest_price(value: Tensor, cost: Tensor) -> float:
    """One at which a cheaper entry is always better."""
    steps = cost.unique().diff()
    return 2 * float(value.max() / steps.min()) if len(steps) else 0.0
