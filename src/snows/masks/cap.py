"""CAP: Optimal Brain Surgeon within small blocks of the empirical Fisher matrix.

Within a block weights are removed one by one, each in view of those already removed. The blocks of all layers are then
compared by the accumulated costs of their removals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..linalg.rows import inverse
from ..patterns import Group
from .base import Choice, Network, Takes, best_masks, require_pattern
from .elimination import Elimination, eliminate
from .fisher import fisher_blocks


@dataclass(frozen=True)
class CAP:
    """Removes weights one by one within small blocks of the Fisher matrix, and updates those that are kept.

    Kuznedelev et al. 2023, "CAP: Correlation-Aware Pruning for Highly-Accurate Sparse Vision Models".

    Args:
        gradients: How many gradients the Fisher matrix is made of.
        batch: Samples whose mean is one gradient.
        damping: Added to the diagonal of the Fisher matrix.
        block: Weights in one block, raised to the next number that divides the layer.

    Example:
        >>> import torch, snows
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
        >>> method = snows.CAP(gradients=32, block=8)
        >>> result = snows.prune(model, torch.randn(64, 8), "2:4", mask=method, layers="0", progress=False)
        >>> int(result.masks["0.weight"].sum())
        16
    """

    gradients: int = 1000
    batch: int = 1
    damping: float = 1e-5
    block: int = 64
    takes: ClassVar[Takes] = "single weights"

    def choose(self, network: Network) -> Choice:
        require_pattern(self, network.patterns)
        places = {name: self._places(w, network.patterns[name].group) for name, w in network.weights.items()}
        scores: dict[str, Tensor] = {}
        masks: dict[str, Tensor] = {}
        for name, g in network.gradients(self.gradients, self.batch):
            weight, group, at = network.weights[name], network.patterns[name].group, places[name]
            elimination = _eliminate(weight.flatten()[at], fisher_blocks(g[:, at], self.damping), group)
            if group is not None:
                all_steps = torch.full((len(at),), elimination.order.shape[1], device=at.device)
                masks[name] = _scatter(elimination.kept(at.shape[1], all_steps), at, weight)
            else:  # the accumulated cost rises within a block, so that its removals keep their order
                scores[name] = _scatter(elimination.losses.cumsum(1), at.gather(1, elimination.order), weight)
        masks |= best_masks(scores, network.patterns)
        weights = {
            name: self._update(network.weights[name], masks[name], places[name], g)
            for name, g in network.gradients(self.gradients, self.batch)
        }
        return Choice({name: masks[name] for name in network.weights}, weights)

    def _update(self, weight: Tensor, mask: Tensor, places: Tensor, gradients: Tensor) -> Tensor:
        """The minimum of the quadratic model over the kept weights, block by block."""
        fisher = fisher_blocks(gradients[:, places], self.damping)
        rows, kept = weight.flatten()[places].double(), mask.flatten()[places]
        pairs = kept[:, :, None] & kept[:, None, :]
        restricted = fisher * pairs + torch.diag_embed((~kept).double())
        targets = (fisher @ rows[:, :, None]) * kept[:, :, None]
        solved = torch.cholesky_solve(targets, torch.linalg.cholesky(restricted)).squeeze(2)
        return _scatter(solved, places, weight).to(weight.dtype)

    def _places(self, weight: Tensor, group: Group | None) -> Tensor:
        """Places in the flattened weight, one block a row. With N:M, the inputs of a group lie side by side."""
        places = torch.arange(weight.numel(), device=weight.device).view(weight.shape)
        if group is not None:
            places = places.movedim(1, -1)
        return places.reshape(-1, self._width(weight.numel(), group))

    def _width(self, size: int, group: Group | None) -> int:
        """The smallest divisor of the layer's size, from `block` on, that consists of whole groups."""
        unit = 1 if group is None else group.size
        return next(width for width in range(min(self.block, size), size + 1) if size % width == 0 == width % unit)


def _eliminate(rows: Tensor, fisher: Tensor, group: Group | None) -> Elimination:
    """Everything in turn; or with a group, as many as it removes."""
    width = rows.shape[1]
    which = torch.arange(len(rows), device=rows.device)
    steps = width if group is None else width * group.removed // group.size
    return eliminate(rows.double(), inverse(fisher), which, steps, group)


def _scatter(values: Tensor, places: Tensor, like: Tensor) -> Tensor:
    """Values of blocks, put at their places in the weight."""
    flat = torch.empty(like.numel(), dtype=values.dtype, device=values.device)
    flat[places.flatten()] = values.flatten()
    return flat.view(like.shape)
