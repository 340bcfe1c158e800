"""Random: the floor that every other source must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from . import Choice, Network, best_masks


@dataclass(frozen=True)
class Random:
    spread: ClassVar[str] = "uniform"

    def choose(self, network: Network) -> Choice:
        generator = torch.Generator().manual_seed(network.seed)
        scores = {name: torch.rand(w.shape, generator=generator).to(w.device) for name, w in network.weights.items()}
        return Choice(best_masks(scores, network.patterns))
