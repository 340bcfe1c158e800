"""Random: the floor that every other source must beat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..patterns import Pattern
from . import Choice, spread_scores


@dataclass(frozen=True)
class Random:
    def choose(self, weights: Mapping[str, Tensor], patterns: Mapping[str, Pattern], seed: int) -> Choice:
        generator = torch.Generator().manual_seed(seed)
        scores = {name: torch.rand(w.shape, generator=generator).to(w.device) for name, w in weights.items()}
        return Choice(spread_scores(scores, patterns, "uniform"))
