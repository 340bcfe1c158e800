"""Magnitude: the smallest weights go. Unstructured patterns rank all layers together, with a cap per layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..patterns import Pattern
from . import Choice, spread_scores


@dataclass(frozen=True)
class Magnitude:
    def choose(self, weights: Mapping[str, Tensor], patterns: Mapping[str, Pattern], seed: int) -> Choice:
        return Choice(spread_scores({name: w.abs() for name, w in weights.items()}, patterns, "global"))
