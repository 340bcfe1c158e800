"""WoodFisher (Singh and Alistarh 2020): saliency and update from the inverse of the block-wise empirical Fisher."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import Choice, Network, best_masks
from .fisher import FisherBlock, slices


@dataclass(frozen=True)
class WoodFisher:
    gradients: int = 1000
    batch: int = 1  # samples behind each gradient
    block: int = 2000
    damping: float = 1e-5

    def choose(self, network: Network) -> Choice:
        diagonals = {
            name: torch.cat([self._fisher(g, part).inverse_diagonal() for part in slices(g.shape[1], self.block)])
            for name, g in network.gradients(self.gradients, self.batch)
        }
        saliency = {
            name: network.weights[name].double().square() / diagonal.view_as(network.weights[name])
            for name, diagonal in diagonals.items()
        }
        masks = best_masks(saliency, network.patterns)
        weights = {
            name: self._update(network.weights[name], masks[name], diagonals[name], g)
            for name, g in network.gradients(self.gradients, self.batch)
        }
        return Choice(masks, weights)

    def _fisher(self, gradients: Tensor, part: slice) -> FisherBlock:
        return FisherBlock(gradients[:, part], self.damping)

    def _update(self, weight: Tensor, mask: Tensor, diagonal: Tensor, gradients: Tensor) -> Tensor:
        """Each removal is made up for as if it were the only one; the sum of all."""
        w, gone = weight.flatten().double(), ~mask.flatten()
        push = torch.where(gone, w / diagonal, torch.zeros_like(w))
        moved = [w[part] - self._fisher(gradients, part).solve(push[part]) for part in slices(len(w), self.block)]
        return (torch.cat(moved) * ~gone).view_as(weight).to(weight.dtype)
