"""WoodFisher: saliency and update from the inverse of the block-wise empirical Fisher matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Choice, Network, best_masks
from .fisher import FisherBlock, slices


@dataclass(frozen=True)
class WoodFisher:
    """Removes the weights that cost least in a quadratic model of the loss, each as if it were the only one.

    Singh and Alistarh 2020, "WoodFisher: Efficient Second-Order Approximation for Neural Network Compression".

    Args:
        gradients: How many gradients the Fisher matrix is made of.
        batch: Samples whose mean is one gradient; 1 is the true empirical Fisher.
        block: Weights of a layer that share one block of the matrix.
        damping: Added to the diagonal of the Fisher matrix.

    Example:
        >>> import torch, snows
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
        >>> method = snows.WoodFisher(gradients=32)
        >>> result = snows.prune(model, torch.randn(64, 8), 0.5, mask=method, layers="0", progress=False)
        >>> int(result.masks["0.weight"].sum())
        16
    """

    gradients: int = 1000
    batch: int = 1
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
        """The sum of the updates that would make up for each removal alone."""
        w, removed = weight.flatten().double(), ~mask.flatten()
        push = torch.where(removed, w / diagonal, torch.zeros_like(w))
        moved = [w[part] - self._fisher(gradients, part).solve(push[part]) for part in slices(len(w), self.block)]
        return (torch.cat(moved) * ~removed).view_as(weight).to(weight.dtype)
