"""Budgets: how a sparsity of several layers together is spread over them. Counts are exact in sum.

uniform   the same share of every layer
global    by the magnitude of all weights together (network methods rank by their own scores instead)
erk       density in proportion to (inputs + outputs + kernel) / size: small layers keep more (Evci et al. 2020)
lamp      by w^2 over the sum of the squares not smaller in its layer, ranked together (Lee et al. 2021)
owl       layers with more outliers of |w| times input norm keep more (Yin et al. 2024)
measured  by a dynamic program over what each layer's pruning was measured to do to the network's output
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..errors import SnowsWarning
from ..linalg.gram import damped
from ..linalg.rows import as_rows, from_rows, least_squares
from .base import NM, Pattern, Spread, Unstructured, keep_best

_OWL_OUTLIER = 5.0  # times the mean
_OWL_RANGE = 0.08  # of sparsities, to either side
_LEVELS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.975, 0.99)
_BUCKETS = 10_000
_DAMPING = 1e-4
_MUCH = 0.5  # from here on depthwise layers suffer


class Measured(Protocol):
    """What budgets may ask of the network."""

    @property
    def weights(self) -> Mapping[str, Tensor]: ...
    @property
    def uses(self) -> Mapping[str, int]: ...

    def grams(self) -> Iterator[tuple[str, Tensor]]:
        """For each layer the second moment of its inputs in the dense network."""

    def output_error(self, weights: Mapping[str, Tensor]) -> float:
        """How far the network's outputs move, relative to their variance, with these weights instead of its own."""


def spread_out(
    patterns: Mapping[str, Pattern], network: Measured, default: Spread, ranks_together: bool
) -> dict[str, Pattern]:
    """Each layer's own sparsity, for patterns that several layers share.

    `default` is for patterns that do not say how they are spread. Where the mask method `ranks_together`, "global" is
    left to it.
    """
    result: dict[str, Pattern] = dict(patterns)
    for pattern in dict.fromkeys(patterns.values()):
        if isinstance(pattern, NM) or pattern.sparsity == 0:
            continue
        names = [name for name, own in patterns.items() if own == pattern]
        spread = pattern.spread or ("measured" if pattern.of == "flops" else default)
        if spread == "global" and ranks_together:
            result |= dict.fromkeys(names, replace(pattern, spread="global"))
            continue
        if pattern.spread is None and spread == "uniform":
            _warn_of_depthwise(pattern, [network.weights[name].shape for name in names])
        counts = _RULES[spread](pattern, {name: network.weights[name] for name in names}, network)
        for name, count in zip(names, counts, strict=True):
            # a tiny layer may go as a whole; a sparsity is below 1, and this one still rounds to all of them
            sparsity = min(count / network.weights[name].numel(), math.nextafter(1, 0))
            result[name] = Unstructured(sparsity, "uniform", most=1.0)
    return result


def _warn_of_depthwise(pattern: Unstructured, shapes: Sequence[torch.Size]) -> None:
    """Nobody asked for the same share of every layer: few weights are in depthwise layers, and each of them counts."""
    depthwise = [shape for shape in shapes if len(shape) > 2 and shape[1] == 1]
    if depthwise and len(depthwise) < len(shapes) and pattern.sparsity >= _MUCH:
        fewest = min(shape[1:].numel() for shape in depthwise)
        warnings.warn(
            f"'{pattern}' takes the same share of every layer, also of {len(depthwise)} depthwise ones, which have as "
            f"few as {fewest} weights for an output; '{pattern} global' spares them, '{pattern} uniform' means it",
            SnowsWarning,
            stacklevel=2,
        )


def apportion(ideal: Sequence[float], sizes: Sequence[int], bounds: Sequence[tuple[int, int]], total: int) -> list[int]:
    """Whole numbers near the ideal ones, within their bounds, that sum to `total`.

    All are moved by the same share of their layer's size until the sum fits.
    """
    clipped: Callable[[float], list[float]] = lambda shift: [  # noqa: E731
        min(max(value + shift * size, low), high) for value, size, (low, high) in zip(ideal, sizes, bounds, strict=True)
    ]
    low, high = -1.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(clipped(middle)) < total else (low, middle)
    values = clipped(high)
    counts = [math.floor(value + 1e-9) for value in values]
    by_remainder = sorted(range(len(values)), key=lambda i: (counts[i] - values[i], i))
    step = 1 if sum(counts) < total else -1
    while sum(counts) != total:
        movable = [i for i in by_remainder if bounds[i][0] <= counts[i] + step <= bounds[i][1]]
        if not movable:
            movable = [i for i in by_remainder if 0 <= counts[i] + step <= sizes[i]]  # rounding of narrow bounds
        for i in movable[: abs(total - sum(counts))]:
            counts[i] += step
    return counts


Weights = Mapping[str, Tensor]


def _uniform(pattern: Unstructured, weights: Weights, network: Measured) -> list[int]:
    if pattern.of == "flops":  # rounded up in every layer, as none makes up for another
        return [math.ceil(pattern.sparsity * w.numel() - 1e-9) for w in weights.values()]
    return _near([pattern.sparsity] * len(weights), pattern, weights)


def _global(pattern: Unstructured, weights: Weights, network: Measured) -> list[int]:
    return _ranked({name: w.abs() for name, w in weights.items()}, pattern)


def _lamp(pattern: Unstructured, weights: Weights, network: Measured) -> list[int]:
    return _ranked({name: lamp_scores(w) for name, w in weights.items()}, pattern)


def lamp_scores(weight: Tensor) -> Tensor:
    """w^2 over the sum of all squares in the layer that are not smaller."""
    squares = weight.double().square().flatten()
    ordered, order = squares.sort(stable=True)
    not_smaller = ordered.flip(0).cumsum(0).flip(0)
    scores = torch.empty_like(squares)
    scores[order] = ordered / not_smaller.clamp(min=torch.finfo(torch.double).tiny)
    return scores.view_as(weight)


def _erk(pattern: Unstructured, weights: Weights, network: Measured) -> list[int]:
    """Densities in proportion, each at most 1: the factor is raised until the sum fits."""
    sizes = [w.numel() for w in weights.values()]
    raw = [sum(w.shape) / math.prod(w.shape) for w in weights.values()]
    kept = (1 - pattern.sparsity) * sum(sizes)
    low, high = 0.0, 1 / min(raw)
    for _ in range(100):
        middle = (low + high) / 2
        reached = sum(min(1.0, middle * r) * size for r, size in zip(raw, sizes, strict=True))
        low, high = (middle, high) if reached < kept else (low, middle)
    return _near([1 - min(1.0, high * r) for r in raw], pattern, weights)


def _owl(pattern: Unstructured, weights: Weights, network: Measured) -> list[int]:
    found = {}
    for name, gram in network.grams():
        if name not in weights:
            continue
        rows, gram = as_rows(weights[name], gram)
        scores = rows.abs() * gram.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()[:, None]
        found[name] = float((scores > _OWL_OUTLIER * scores.mean()).double().mean())
    shares = [found[name] for name in weights]
    width = (max(shares) - min(shares)) or 1.0
    middle = (max(shares) + min(shares)) / 2
    return _near([pattern.sparsity - 2 * _OWL_RANGE * (s - middle) / width for s in shares], pattern, weights)


def _measured(pattern: Unstructured, weights: Weights, network: Measured) -> list[int]:
    """The levels of all layers whose errors sum to the least, for what may be kept (weights or multiplications)."""
    measured: dict[str, tuple[list[float], list[int]]] = {}
    for name, gram in network.grams():
        if name not in weights:
            continue
        weight = weights[name]
        least, most = pattern.bounds(weight.numel())
        levels = sorted(
            {min(max(round(level * weight.numel()), least), most) for level in (*_LEVELS, pattern.sparsity)}
        )
        rows, gram = as_rows(weight, gram)
        gram = damped(gram, _DAMPING)
        own = []
        for removed in levels:
            kept = keep_best({"": weight.abs()}, removed / weight.numel())[""]
            refitted = least_squares(rows, gram, kept.movedim(1, -1).reshape(rows.shape).to(rows.device))
            own.append(network.output_error({name: from_rows(refitted, weight)}) if removed else 0.0)
        measured[name] = own, levels
    errors, counts = zip(*(measured[name] for name in weights), strict=True)
    price = [network.uses[name] if pattern.of == "flops" else 1 for name in weights]
    sizes = [w.numel() for w in weights.values()]
    removable = [[p * count for count in own] for p, own in zip(price, counts, strict=True)]
    needed = pattern.sparsity * sum(p * size for p, size in zip(price, sizes, strict=True))
    chosen = [own[level] for own, level in zip(counts, cheapest_levels(errors, removable, needed), strict=True)]
    if pattern.of == "flops":
        return chosen
    return apportion(chosen, sizes, _bounds(pattern, weights), round(pattern.sparsity * sum(sizes)))


def cheapest_levels(errors: Sequence[Sequence[float]], gains: Sequence[Sequence[float]], needed: float) -> list[int]:
    """One level for each layer, with the least sum of errors whose gains sum to `needed` at least.

    Exact but for the gains being counted in buckets, rounded so that their sum is never too small.
    """
    width = needed / _BUCKETS
    places = torch.arange(_BUCKETS + 1)
    best = torch.full((_BUCKETS + 1,), math.inf, dtype=torch.double)  # the least error for each gain still needed
    best[0] = 0
    tables: list[Tensor] = []
    for own_errors, own_gains in zip(errors, gains, strict=True):
        options = [
            error + best[(places - math.floor(gain / width + 1e-9)).clamp(min=0)]
            for error, gain in zip(own_errors, own_gains, strict=True)
        ]
        best, levels = torch.stack(options).min(0)
        tables.append(levels)
    if not math.isfinite(float(best[-1])):  # out of reach by the rounding: as much of every layer as allowed
        return [len(own) - 1 for own in errors]
    chosen, left = [], _BUCKETS
    for levels, own_gains in zip(reversed(tables), reversed(gains), strict=True):
        level = int(levels[left])
        chosen.append(level)
        left = max(0, left - math.floor(own_gains[level] / width + 1e-9))
    return chosen[::-1]


def _near(sparsities: Sequence[float], pattern: Unstructured, weights: Weights) -> list[int]:
    sizes = [w.numel() for w in weights.values()]
    ideal = [s * size for s, size in zip(sparsities, sizes, strict=True)]
    return apportion(ideal, sizes, _bounds(pattern, weights), round(pattern.sparsity * sum(sizes)))


def _bounds(pattern: Unstructured, weights: Weights) -> list[tuple[int, int]]:
    return [pattern.bounds(w.numel()) for w in weights.values()]


def _ranked(scores: Weights, pattern: Unstructured) -> list[int]:
    bounds = {name: pattern.bounds(score.numel()) for name, score in scores.items()}
    return [int((~mask).sum()) for mask in keep_best(scores, pattern.sparsity, bounds).values()]


_RULES: dict[Spread, Callable[[Unstructured, Weights, Measured], list[int]]] = {
    "uniform": _uniform,
    "global": _global,
    "erk": _erk,
    "lamp": _lamp,
    "owl": _owl,
    "measured": _measured,
}
