"""Magnitude: the smallest weights are removed."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Choice, Network, best_masks


@dataclass(frozen=True)
class Magnitude:
    """Removes the weights with the smallest magnitudes; a sparsity ranks all layers together, with a cap for each.

    The oldest rule of the field (Janowsky 1989, Han et al. 2015). It looks at no data.

    Example:
        >>> import torch, snows
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2)).eval()
        >>> result = snows.prune(model, torch.randn(64, 4), "1:4", mask=snows.Magnitude(), layers="0", progress=False)
        >>> largest = model[0].weight.detach().abs().argmax(1)
        >>> bool((result.masks["0.weight"].int().argmax(1) == largest).all())
        True
    """

    def choose(self, network: Network) -> Choice:
        return Choice(best_masks({name: w.abs() for name, w in network.weights.items()}, network.patterns))
