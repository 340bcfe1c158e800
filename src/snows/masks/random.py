"""Random masks: the floor that every other method must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..patterns import Spread
from .base import Choice, Network, best_masks


@dataclass(frozen=True)
class Random:
    """Removes random weights, the same share of every layer. The seed of the run decides which.

    The floor that every other method must beat.

    Example:
        >>> import torch, snows
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
        >>> samples = torch.randn(64, 8)
        >>> one, two = (
        ...     snows.prune(model, samples, 0.5, mask=snows.Random(), layers="0", seed=seed, progress=False)
        ...     for seed in (1, 2)
        ... )
        >>> bool((one.masks["0.weight"] == two.masks["0.weight"]).all()), int(one.masks["0.weight"].sum())
        (False, 16)
    """

    spread: ClassVar[Spread] = "uniform"

    def choose(self, network: Network) -> Choice:
        generator = torch.Generator().manual_seed(network.seed)
        scores = {name: torch.rand(w.shape, generator=generator).to(w.device) for name, w in network.weights.items()}
        return Choice(best_masks(scores, network.patterns))
