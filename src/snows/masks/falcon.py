"""FALCON: a budget of weights and one of multiplications together, then CHITA on the support.

The support keeps as much squared weight as both budgets allow. Its dual has two prices, one for a weight and one for a
multiplication: a weight is kept if its square is worth its price.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..patterns import Budget, ranks_within
from .base import Choice, Network, Takes, best_masks, require_pattern
from .chita import CHITA

_HALVINGS = 60


@dataclass(frozen=True)
class FALCON:
    """Keeps the most squared weight within a budget of weights and one of multiplications. Unstructured patterns only.

    Meng et al. 2024, "FALCON: FLOP-Aware Combinatorial Optimization for Neural Network Pruning".

    Args:
        flops: The share of multiplications removed, beside the pattern's share of weights; None for no such budget.
        solver: Gives the weights on that support.

    Raises:
        ArgumentError: If `flops` is not between 0 and 1.

    Example:
        >>> import torch, snows
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
        >>> method = snows.FALCON(flops=0.5, solver=snows.CHITA(gradients=32))
        >>> result = snows.prune(model, torch.randn(64, 8), 0.5, mask=method, layers="0", progress=False)
        >>> int(result.masks["0.weight"].sum())
        16
    """

    flops: float | None = None
    solver: CHITA = field(default_factory=CHITA)
    takes: ClassVar[Takes] = "unstructured"

    def __post_init__(self) -> None:
        if self.flops is not None and not 0 < self.flops < 1:
            raise ArgumentError(f"FALCON: flops is {self.flops}; expected the share removed, between 0 and 1")

    def choose(self, network: Network) -> Choice:
        require_pattern(self, network.patterns)
        squares = {name: w.double().square() for name, w in network.weights.items()}
        if self.flops is None:
            masks = best_masks(squares, network.patterns)
        else:
            masks = _under_both_budgets(squares, network, self.flops)
        # Multiplications are counted by layer: with a budget of them, each layer keeps its number of weights.
        return self.solver.solve_on(masks, network, between_layers=self.flops is None)


def _under_both_budgets(squares: dict[str, Tensor], network: Network, flops: float) -> dict[str, Tensor]:
    budget = _shared_budget(network)
    layers = [s.flatten() for s in squares.values()]
    value = torch.cat(layers)
    cost = torch.cat([torch.full_like(s.flatten(), network.uses[name]) for name, s in squares.items()])
    count = len(value) - round(budget.sparsity * len(value))
    work = (1 - flops) * float(cost.sum())
    # By default, a layer's bound is that of the stricter of both budgets.
    bounding = budget if budget.most is not None else replace(budget, sparsity=max(budget.sparsity, flops))
    ranks = torch.cat([ranks_within(layer, *bounding.bounds(len(layer))) for layer in layers])
    kept = two_budgets(value, cost, count, work, ranks)
    if int(kept.sum()) < count:
        if budget.most is not None:
            raise ArgumentError(
                f"FALCON: {flops:.0%} fewer multiplications cannot be had at a sparsity of {budget.sparsity:g} where "
                f"no layer loses more than {budget.most:.0%} (max={budget.most:g}); lower flops, or raise max or the "
                "sparsity"
            )
        kept = two_budgets(value, cost, count, work, ranks.clamp(max=0))  # the budgets come before the default bound
    parts = kept.split([len(layer) for layer in layers])
    return {name: part.view_as(s) for (name, s), part in zip(squares.items(), parts, strict=True)}


def _shared_budget(network: Network) -> Budget:
    """The budget of all layers together."""
    patterns = set(network.patterns.values())
    budget = next(iter(patterns)).budget
    if len(patterns) != 1 or budget is None or budget.spread != "global":
        raise ArgumentError("FALCON with a budget of flops takes one sparsity for all layers, such as 0.7")
    return budget


def two_budgets(value: Tensor, cost: Tensor, count: int, work: float, ranks: Tensor | None = None) -> Tensor:
    """The `count` entries with the largest sum of values whose costs sum to at most `work`, as a mask.

    If entries have ranks, those of a higher rank come first, whatever their values. At a given price for work, the best
    entries have the largest value minus price times cost; a higher price gives cheaper ones. The lowest price at which
    they fit minimizes the dual, and its choice is one exchange of entries away from the best. If even the cheapest
    entries are too many, fewer are kept.
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
        best = best[cost[best].cumsum(0) <= work]  # all of them, unless the cheapest are too many
    kept = torch.zeros_like(value, dtype=torch.bool)
    kept[best] = True
    return kept


def _best(value: Tensor, count: int, ranks: Tensor | None) -> Tensor:
    order = value.argsort(descending=True, stable=True)
    if ranks is not None:
        order = order[ranks[order].argsort(descending=True, stable=True)]
    return order[:count]


def _highest_price(value: Tensor, cost: Tensor) -> float:
    """A price at which a cheaper entry is always better."""
    steps = cost.unique().diff()
    return 2 * float(value.max() / steps.min()) if len(steps) else 0.0
