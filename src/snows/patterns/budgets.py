"""Budgets: how a sparsity that several layers reach together is spread over them. Counts are exact in sum.

uniform   the same share of every layer
global    by the magnitude of all weights together (network methods rank by their own scores instead)
erk       density in proportion to (inputs + outputs + kernel) / size: small layers keep more (Evci et al. 2020)
lamp      by w^2 over the sum of the squares that are not smaller in its layer, ranked together (Lee et al. 2021)
owl       layers with more outliers of |w| times input norm keep more (Yin et al. 2024)
measured  the sparsities with the least sum of measured output errors, by dynamic programming; measured now, or by
          `snows sensitivity` before
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..errors import SnowsWarning
from ..linalg.gram import damped
from ..linalg.rows import as_rows, from_rows, in_rows, least_squares
from .base import ROUNDING, Budget, Pattern, Spread
from .unstructured import keep_best, without_lowest

_OWL_OUTLIER = 5.0  # times the mean
_OWL_RANGE = 0.08  # how far sparsities move to either side
_LEVELS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.975, 0.99)
_BUCKETS = 10_000
_DAMPING = 1e-4
_HARMS_DEPTHWISE = 0.5  # the sparsity from which on depthwise layers suffer
_HALVINGS = 60


class Trial(Protocol):
    """One layer, whose weight may be exchanged for another."""

    @property
    def name(self) -> str: ...
    @property
    def gram(self) -> Tensor:
        """The second moment of its inputs in the dense network."""

    def error(self, weight: Tensor) -> float:
        """How far the network's outputs move with this weight, relative to their variance."""


class Measured(Protocol):
    """What the rules need to know of the network."""

    @property
    def weights(self) -> Mapping[str, Tensor]: ...
    @property
    def uses(self) -> Mapping[str, int]: ...

    def grams(self) -> Iterator[tuple[str, Tensor]]:
        """For each layer the second moment of its inputs in the dense network."""

    def trials(self) -> Iterator[Trial]:
        """Every layer, to be changed alone."""


def spread_out(
    patterns: Mapping[str, Pattern], network: Measured, default: Spread, ranks_together: bool
) -> dict[str, Pattern]:
    """Each layer's own pattern, with a sparsity of its own where layers share a budget.

    `default` is for budgets that do not say how they are spread. If the mask method `ranks_together`, it spreads
    "global" budgets itself.
    """
    result: dict[str, Pattern] = dict(patterns)
    for pattern in dict.fromkeys(patterns.values()):
        budget = pattern.budget
        if budget is None or budget.sparsity == 0:
            continue
        weights = {name: network.weights[name] for name, own in patterns.items() if own == pattern}
        spread = budget.spread or ("measured" if budget.of == "flops" else default)
        if spread == "global" and ranks_together:
            result |= dict.fromkeys(weights, pattern.with_budget(replace(budget, spread="global")))
            continue
        if budget.spread is None and spread == "uniform":
            _warn_of_depthwise(pattern, [weight.shape for weight in weights.values()])
        counts = _RULES[spread](budget, weights, network)
        for (name, weight), count in zip(weights.items(), counts, strict=True):
            # A tiny layer may be removed entirely. A sparsity is below 1; this one still rounds to all of its weights.
            sparsity = min(count / weight.numel(), math.nextafter(1, 0))
            result[name] = pattern.with_budget(Budget(sparsity, "uniform", most=1.0))
    return result


def _warn_of_depthwise(pattern: Pattern, shapes: Sequence[torch.Size]) -> None:
    """Depthwise layers hold few weights, and each of them counts: the same share for all may not be what is wanted."""
    depthwise = [shape for shape in shapes if len(shape) > 2 and shape[1] == 1]
    if depthwise and len(depthwise) < len(shapes) and pattern.sparsity >= _HARMS_DEPTHWISE:
        fewest = min(shape[1:].numel() for shape in depthwise)
        warnings.warn(
            f"'{pattern}' removes the same share of every layer, also of {len(depthwise)} depthwise ones, which have "
            f"as few as {fewest} weights for an output; write '{pattern} global' to spare them, or '{pattern} uniform' "
            "to silence this warning",
            SnowsWarning,
            stacklevel=2,
        )


def apportion(ideal: Sequence[float], sizes: Sequence[int], bounds: Sequence[tuple[int, int]], total: int) -> list[int]:
    """Whole numbers near the ideal ones, within their bounds, that sum to `total`.

    All are moved by the same share of their layer's size until the sum fits. The sum comes before the bounds.
    """
    values = _shifted_to_sum(ideal, sizes, bounds, total)
    counts = [math.floor(value + ROUNDING) for value in values]
    by_remainder = sorted(range(len(values)), key=lambda i: (counts[i] - values[i], i))
    step = 1 if sum(counts) < total else -1
    while sum(counts) != total:
        movable = [i for i in by_remainder if bounds[i][0] <= counts[i] + step <= bounds[i][1]]
        if not movable:  # the bounds are too narrow for whole numbers
            movable = [i for i in by_remainder if 0 <= counts[i] + step <= sizes[i]]
        for i in movable[: abs(total - sum(counts))]:
            counts[i] += step
    return counts


def _shifted_to_sum(
    ideal: Sequence[float], sizes: Sequence[int], bounds: Sequence[tuple[int, int]], total: int
) -> list[float]:
    """The ideal numbers, moved by the same share of their sizes and clipped to their bounds, so that they sum up."""

    def clipped(shift: float) -> list[float]:
        triples = zip(ideal, sizes, bounds, strict=True)
        return [min(max(value + shift * size, low), high) for value, size, (low, high) in triples]

    low, high = -1.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(clipped(middle)) < total else (low, middle)
    return clipped(high)


Weights = Mapping[str, Tensor]


def _uniform(budget: Budget, weights: Weights, network: Measured) -> list[int]:
    if budget.of == "flops":  # rounded up in every layer, since no layer makes up for another
        return [math.ceil(budget.sparsity * w.numel() - ROUNDING) for w in weights.values()]
    return _near([budget.sparsity] * len(weights), budget, weights)


def _global(budget: Budget, weights: Weights, network: Measured) -> list[int]:
    return _ranked({name: w.abs() for name, w in weights.items()}, budget)


def _lamp(budget: Budget, weights: Weights, network: Measured) -> list[int]:
    return _ranked({name: lamp_scores(w) for name, w in weights.items()}, budget)


def lamp_scores(weight: Tensor) -> Tensor:
    """w^2 over the sum of all squares in the layer that are not smaller."""
    squares = weight.double().square().flatten()
    ascending, order = squares.sort(stable=True)
    not_smaller = ascending.flip(0).cumsum(0).flip(0)
    scores = torch.empty_like(squares)
    scores[order] = ascending / not_smaller.clamp(min=torch.finfo(torch.double).tiny)
    return scores.view_as(weight)


def _erk(budget: Budget, weights: Weights, network: Measured) -> list[int]:
    """Densities in proportion to (inputs + outputs + kernel) / size, each at most 1; the factor makes the sum fit."""
    sizes = [w.numel() for w in weights.values()]
    raw = [sum(w.shape) / math.prod(w.shape) for w in weights.values()]
    wanted = (1 - budget.sparsity) * sum(sizes)
    low, high = 0.0, 1 / min(raw)
    for _ in range(100):
        middle = (low + high) / 2
        kept = sum(min(1.0, middle * r) * size for r, size in zip(raw, sizes, strict=True))
        low, high = (middle, high) if kept < wanted else (low, middle)
    return _near([1 - min(1.0, high * r) for r in raw], budget, weights)


def _owl(budget: Budget, weights: Weights, network: Measured) -> list[int]:
    outliers = {}
    for name, gram in network.grams():
        if name not in weights:
            continue
        rows, gram = as_rows(weights[name].to(gram.device), gram)
        scores = rows.abs() * gram.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()[:, None]
        outliers[name] = float((scores > _OWL_OUTLIER * scores.mean()).double().mean())
    shares = [outliers[name] for name in weights]
    width = (max(shares) - min(shares)) or 1.0
    middle = (max(shares) + min(shares)) / 2
    return _near([budget.sparsity - 2 * _OWL_RANGE * (s - middle) / width for s in shares], budget, weights)


def _measured(budget: Budget, weights: Weights, network: Measured) -> list[int]:
    """The levels of all layers with the least sum of errors that remove enough (weights, or multiplications)."""
    counts = {name: _levels(budget, weight.numel()) for name, weight in weights.items()}
    if budget.curves is not None:
        errors = {name: budget.curves.errors(name, w.numel(), counts[name]) for name, w in weights.items()}
    else:
        errors = {
            trial.name: _errors(counts[trial.name], weights[trial.name], trial)
            for trial in network.trials()
            if trial.name in weights
        }
    price = [network.uses[name] if budget.of == "flops" else 1 for name in weights]
    sizes = [w.numel() for w in weights.values()]
    gains = [[p * count for count in counts[name]] for p, name in zip(price, weights, strict=True)]
    needed = budget.sparsity * sum(p * size for p, size in zip(price, sizes, strict=True))
    levels = cheapest_levels([errors[name] for name in weights], gains, needed)
    chosen = [counts[name][level] for name, level in zip(weights, levels, strict=True)]
    if budget.of == "flops":
        return chosen
    return apportion(chosen, sizes, _bounds(budget, weights), round(budget.sparsity * sum(sizes)))


def _levels(budget: Budget, size: int) -> list[int]:
    """The numbers of removed weights that are tried in a layer of this size."""
    least, most = budget.bounds(size)
    return sorted({min(max(round(level * size), least), most) for level in (*_LEVELS, budget.sparsity)})


def _errors(counts: Sequence[int], weight: Tensor, trial: Trial) -> list[float]:
    """The network's output error once the layer lost so many of its smallest weights and was refitted."""
    masks = (without_lowest(weight.abs(), count) for count in counts)
    refitted = refits(weight, trial.gram, masks)
    return [trial.error(new) if count else 0.0 for count, new in zip(counts, refitted, strict=True)]


def refits(weight: Tensor, gram: Tensor, masks: Iterable[Tensor]) -> Iterator[Tensor]:
    """For each mask the kept weights by which the layer's outputs are closest to those of the whole weight."""
    rows, gram = as_rows(weight, gram)
    gram = damped(gram, _DAMPING)
    for mask in masks:
        yield from_rows(least_squares(rows, gram, in_rows(mask, gram)), weight)


def cheapest_levels(errors: Sequence[Sequence[float]], gains: Sequence[Sequence[float]], needed: float) -> list[int]:
    """One level for each layer, with the least sum of errors, so that the gains sum to at least `needed`.

    Exact, except that gains are counted in buckets. They are rounded down, so their sum is never too small.
    """
    width = needed / _BUCKETS
    still_needed = torch.arange(_BUCKETS + 1)
    best = torch.full((_BUCKETS + 1,), math.inf, dtype=torch.double)  # the least error for each gain still needed
    best[0] = 0
    tables: list[Tensor] = []
    for own_errors, own_gains in zip(errors, gains, strict=True):
        options = [
            error + best[(still_needed - _buckets(gain, width)).clamp(min=0)]
            for error, gain in zip(own_errors, own_gains, strict=True)
        ]
        best, levels = torch.stack(options).min(0)
        tables.append(levels)
    if not math.isfinite(float(best[-1])):  # out of reach because of the rounding: as much of every layer as allowed
        return [len(own) - 1 for own in errors]
    chosen, left = [], _BUCKETS
    for levels, own_gains in zip(reversed(tables), reversed(gains), strict=True):
        level = int(levels[left])
        chosen.append(level)
        left = max(0, left - _buckets(own_gains[level], width))
    return chosen[::-1]


def _buckets(gain: float, width: float) -> int:
    return math.floor(gain / width + ROUNDING)


def _near(sparsities: Sequence[float], budget: Budget, weights: Weights) -> list[int]:
    sizes = [w.numel() for w in weights.values()]
    ideal = [s * size for s, size in zip(sparsities, sizes, strict=True)]
    return apportion(ideal, sizes, _bounds(budget, weights), round(budget.sparsity * sum(sizes)))


def _bounds(budget: Budget, weights: Weights) -> list[tuple[int, int]]:
    return [budget.bounds(w.numel()) for w in weights.values()]


def _ranked(scores: Weights, budget: Budget) -> list[int]:
    bounds = {name: budget.bounds(score.numel()) for name, score in scores.items()}
    return [int((~mask).sum()) for mask in keep_best(scores, budget.sparsity, bounds).values()]


_RULES: dict[Spread, Callable[[Budget, Weights, Measured], list[int]]] = {
    "uniform": _uniform,
    "global": _global,
    "erk": _erk,
    "lamp": _lamp,
    "owl": _owl,
    "measured": _measured,
}
