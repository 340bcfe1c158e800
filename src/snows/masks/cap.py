"""CAP (Kuznedelev et al. 2023): Optimal Brain Surgeon within small blocks of the empirical Fisher.

Within a block weights go one by one, each seeing those that went before; blocks of all layers are then compared by what
their removals have cost in sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..linalg.rows import inverse
from ..patterns.base import NM, Pattern
from . import Choice, Network, best_masks
from .elimination import Elimination, eliminate
from .fisher import fisher_blocks


@dataclass(frozen=True)
class CAP:
    gradients: int = 1000
    batch: int = 1  # samples behind each gradient
    damping: float = 1e-5
    block: int = 64

    def choose(self, network: Network) -> Choice:
        blocks = {name: self._blocks(w, network.patterns[name]) for name, w in network.weights.items()}
        scores: dict[str, Tensor] = {}
        masks: dict[str, Tensor] = {}
        for name, g in network.gradients(self.gradients, self.batch):
            weight, pattern, places = network.weights[name], network.patterns[name], blocks[name]
            found = self._eliminate(weight.flatten()[places], fisher_blocks(g[:, places], self.damping), pattern)
            if isinstance(pattern, NM):
                everything = torch.full((len(places),), found.order.shape[1], device=places.device)
                masks[name] = _scatter(found.kept(places.shape[1], everything), places, weight)
            else:  # what its block has cost once a weight is gone: rising, so that a block's removals keep their order
                scores[name] = _scatter(found.losses.cumsum(1), places.gather(1, found.order), weight)
        masks |= best_masks(scores, network.patterns)
        weights = {
            name: self._update(network.weights[name], masks[name], blocks[name], g)
            for name, g in network.gradients(self.gradients, self.batch)
        }
        return Choice({name: masks[name] for name in network.weights}, weights)

    @staticmethod
    def _eliminate(rows: Tensor, fisher: Tensor, pattern: Pattern) -> Elimination:
        width = rows.shape[1]
        which = torch.arange(len(rows), device=rows.device)
        start = inverse(fisher)
        if isinstance(pattern, NM):
            gone = pattern.m - pattern.n
            return eliminate(rows.double(), start, which, width * gone // pattern.m, (pattern.m, gone))
        return eliminate(rows.double(), start, which, width)

    def _update(self, weight: Tensor, mask: Tensor, places: Tensor, gradients: Tensor) -> Tensor:
        """The minimum of the quadratic model on what is kept, block by block."""
        fisher = fisher_blocks(gradients[:, places], self.damping)
        rows, kept = weight.flatten()[places].double(), mask.flatten()[places]
        pairs = kept[:, :, None] & kept[:, None, :]
        restricted = fisher * pairs + torch.diag_embed((~kept).double())
        wanted = (fisher @ rows[:, :, None]) * kept[:, :, None]
        solved = torch.cholesky_solve(wanted, torch.linalg.cholesky(restricted)).squeeze(2)
        return _scatter(solved, places, weight).to(weight.dtype)

    def _blocks(self, weight: Tensor, pattern: Pattern) -> Tensor:
        """Places of the flattened weight, one block a row. Of N:M, whole groups of M inputs side by side."""
        places = torch.arange(weight.numel(), device=weight.device).view(weight.shape)
        if isinstance(pattern, NM):
            places = places.movedim(1, -1)
        return places.reshape(-1, self._width(weight, pattern))

    def _width(self, weight: Tensor, pattern: Pattern) -> int:
        """The block raised to the next divisor of the layer's size; of N:M, of whole groups."""
        unit = pattern.m if isinstance(pattern, NM) else 1
        size = weight.numel()
        return next(width for width in range(min(self.block, size), size + 1) if size % width == 0 == width % unit)


def _scatter(values: Tensor, places: Tensor, like: Tensor) -> Tensor:
    """Values of blocks, back at their places in the weight."""
    flat = torch.empty(like.numel(), dtype=values.dtype, device=values.device)
    flat[places.flatten()] = values.flatten()
    return flat.view(like.shape)
