"""Unstructured sparsity: a share of the weights removed, wherever they are. Counts are exact."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor

from .base import SPREADS, Budget, Pattern
from .curves import Curves


@final
@dataclass(frozen=True)
class Unstructured(Budget, Pattern):
    """A share of the weights removed, wherever they are. All layers with an equal pattern reach it together.

    Written as the sparsity, followed by options: "0.7", "0.7 erk", "0.5 measured flops max=0.9".

    Args:
        sparsity: The fraction removed; exactly round(sparsity * n) of all n weights.
        spread: How the share is spread over layers. "uniform" takes the same share of every layer, "global" ranks the
            weights of all layers together, "erk" keeps more of small layers (Evci et al. 2020), "lamp" ranks by
            magnitudes relative to their layer (Lee et al. 2021), "owl" keeps more where there are outliers (Yin et al.
            2024), "measured" minimizes the measured error of the network's output. None leaves it to the mask method.
        of: What `sparsity` is a share of: "weights", or "flops" for multiplications (at least this share is removed).
        least: The lowest sparsity of a layer ("min=" in text).
        most: The highest sparsity of a layer ("max=" in text). None keeps at least a quarter of the average density.
        curves: For "measured": what `snows.sensitivity` measured ("measured=FILE" in text). None: it is measured anew.

    Raises:
        ArgumentError: If a value is out of its range, or flops are to be spread by a rule for weights.

    Example:
        >>> import torch, snows
        >>> snows.Unstructured(0.5).best_mask(torch.tensor([[0.1, 0.9], [0.5, 0.3]]))
        tensor([[False,  True],
                [ True, False]])
        >>> str(snows.Unstructured(0.7, spread="erk", most=0.9))
        '0.7 erk max=0.9'
    """

    form: ClassVar[str] = (
        "a sparsity between 0 and 1 (such as 0.7, '0.7 erk', '0.7 measured=FILE' or '0.7 measured flops max=0.9'; "
        f"spread {', '.join(SPREADS)})"
    )

    @classmethod
    def parse(cls, text: str) -> Self | None:
        number, *words = text.split() or [""]
        try:
            sparsity = float(number)
        except ValueError:
            return None
        options = _parse_options(words)
        return cls(sparsity, **options) if 0 < sparsity < 1 and options is not None else None

    def __str__(self) -> str:
        spread = self.spread if self.curves is None else f"measured={self.curves.source}"
        words = [f"{self.sparsity}", spread, "flops" if self.of == "flops" else None]
        words += [f"min={self.least}" if self.least else None, None if self.most is None else f"max={self.most}"]
        return " ".join(word for word in words if word)

    @property
    def is_unstructured(self) -> bool:
        return True

    @property
    def budget(self) -> Budget:
        return self

    def with_budget(self, budget: Budget) -> Unstructured:
        return Unstructured(budget.sparsity, budget.spread, budget.of, budget.least, budget.most, budget.curves)

    def best_mask(self, score: Tensor) -> Tensor:
        return without_lowest(score, round(self.sparsity * score.numel()))

    def best_mask_by_row(self, score: Tensor) -> Tensor:
        """Each output row loses the same number of weights; the first rows lose one more where that does not divide."""
        rows = score.shape[0]
        removed = round(self.sparsity * score.numel())
        counts = torch.full((rows, 1), removed // rows, device=score.device)
        counts[: removed % rows] += 1
        rank = score.flatten(1).argsort(dim=1, stable=True).argsort(dim=1, stable=True)
        return (rank >= counts).view_as(score)

    def best_masks(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self.ranked_together:
            return super().best_masks(scores)
        return keep_best(scores, self.sparsity, {name: self.bounds(score.numel()) for name, score in scores.items()})

    def on_the_way(self, share: float) -> Unstructured:
        """Each equal part of the way keeps the same share of what was left."""
        if share == 1:
            return self
        sparsity, least = (1 - (1 - removed) ** share for removed in (self.sparsity, self.least))
        return replace(self, sparsity=sparsity, least=least)

    def violations(self, mask: Tensor) -> int:
        """Always 0: any weight may be kept, and what is counted is the sum over layers."""
        return 0

    def complaint(self, masks: Mapping[str, Tensor]) -> str | None:
        if not self.ranked_together:
            return next(filter(None, (self._miscount({name: mask}) for name, mask in masks.items())), None)
        return self._miscount(masks) or (self._out_of_bounds(masks) if len(masks) > 1 else None)

    def _miscount(self, masks: Mapping[str, Tensor]) -> str | None:
        removed = sum(int((~mask).sum()) for mask in masks.values())
        expected = round(self.sparsity * sum(mask.numel() for mask in masks.values()))
        if removed == expected:
            return None
        return f"it removes {removed} of {', '.join(masks)}; expected {expected} (True means kept)"

    def _out_of_bounds(self, masks: Mapping[str, Tensor]) -> str | None:
        for name, mask in masks.items():
            removed, (least, most) = int((~mask).sum()), self.bounds(mask.numel())
            if not least <= removed <= most:
                return f"it removes {removed} of {name}; expected {least} to {most}"
        return None


def _parse_options(words: list[str]) -> dict[str, Any] | None:
    """The words after a sparsity as arguments; None if one of them is unknown."""
    options: dict[str, Any] = {}
    for word in words:
        if word in SPREADS:
            options["spread"] = word
        elif word == "flops":
            options["of"] = word
        elif word.startswith("measured="):
            options |= {"spread": "measured", "curves": Curves(word.removeprefix("measured="))}
        elif match := re.fullmatch(r"(min|max)=(\d*\.?\d+(?:e-\d+)?)", word):
            options["least" if match[1] == "min" else "most"] = float(match[2])
        else:
            return None
    return options


def without_lowest(score: Tensor, count: int) -> Tensor:
    """The mask without the `count` lowest scores; of equal ones the first are removed."""
    kept = torch.ones(score.numel(), dtype=torch.bool, device=score.device)
    kept[score.flatten().argsort(stable=True)[:count]] = False
    return kept.view(score.shape)


def keep_best(
    scores: Mapping[str, Tensor], sparsity: float, bounds: Mapping[str, tuple[int, int]] | None = None
) -> dict[str, Tensor]:
    """Remove exactly round(sparsity * n) of the n weights of all layers, the lowest scores first.

    `bounds` are the numbers of weights that each layer loses at least and at most. The exact total comes before them.
    """
    parts = [score.flatten() for score in scores.values()]
    order = torch.cat(parts).argsort(stable=True)
    if bounds is not None and len(scores) > 1:
        ranks = [ranks_within(part, *bounds[name]) for name, part in zip(scores, parts, strict=True)]
        order = order[torch.cat(ranks)[order].argsort(stable=True)]
    kept = torch.ones(len(order), dtype=torch.bool, device=order.device)
    kept[order[: round(sparsity * len(order))]] = False
    split = kept.split([part.numel() for part in parts])
    return {name: part.view(score.shape) for (name, score), part in zip(scores.items(), split, strict=True)}


def ranks_within(score: Tensor, least: int, most: int) -> Tensor:
    """In which order weights are to go: -1 for the `least` that must, 1 for all beyond `most`, 0 for those between."""
    order = score.argsort(stable=True)
    rank = torch.zeros_like(score, dtype=torch.int8)
    rank[order[:least]] = -1
    rank[order[most:]] = 1
    return rank
