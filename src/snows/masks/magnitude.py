"""Magnitude: the smallest weights go. Unstructured patterns rank all layers together, with a cap per layer."""

from __future__ import annotations

from dataclasses import dataclass

from . import Choice, Network, best_masks


@dataclass(frozen=True)
class Magnitude:
    def choose(self, network: Network) -> Choice:
        return Choice(best_masks({name: w.abs() for name, w in network.weights.items()}, network.patterns))
