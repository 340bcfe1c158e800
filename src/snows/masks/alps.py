"""ALPS: a layer's least squares under its pattern, by ADMM with a rising penalty, then solved on the support.

One set of weights follows the least squares, another one the pattern, and a price is put on their difference. As the
penalty rises they meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..linalg.gram import damped
from ..linalg.large import eigh
from ..linalg.rows import as_rows, from_rows, in_rows, least_squares
from ..patterns import Pattern
from .base import Choice, Reads

_STEPS_BETWEEN_CHANGES = 3  # of the penalty


@dataclass(frozen=True)
class ALPS:
    """Solves a layer's least squares under its pattern by ADMM: better than greedy removal at high sparsities.

    Meng et al. 2024, "ALPS: Improved Optimization for Highly Sparse One-Shot Pruning for Large Language Models".

    Args:
        damping: Added to the Gram matrix, relative to its mean diagonal.
        penalty: The first penalty of ADMM, with inputs scaled to unit norm.
        steps: Steps of ADMM, at most. It ends earlier once the support stays the same.
        reads: Which inputs the Gram matrix is of, see `snows.LayerMethod`.

    Example:
        >>> import torch, snows
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
        >>> result = snows.prune(model, torch.randn(64, 8), 0.5, mask=snows.ALPS(), layers="0", progress=False)
        >>> int(result.masks["0.weight"].sum())
        16
    """

    damping: float = 0.01
    penalty: float = 0.1
    steps: int = 300
    reads: Reads = "auto"

    def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Pattern) -> Choice:
        rows, gram = as_rows(weight, gram)
        gram = damped(gram, self.damping)
        norms = gram.diagonal(dim1=1, dim2=2).sqrt()
        scaled = gram / (norms[:, :, None] * norms[:, None, :])
        kept = self._admm(rows * norms[:, None], scaled, pattern, weight)
        # The published method ends with a few masked CG steps on these least squares. This is where they lead.
        return Choice({name: from_rows(kept, weight)}, {name: from_rows(least_squares(rows, gram, kept), weight)})

    def _admm(self, rows: Tensor, gram: Tensor, pattern: Pattern, like: Tensor) -> Tensor:
        def support(values: Tensor) -> Tensor:
            score = from_rows(values.abs(), torch.empty_like(like, dtype=values.dtype))
            return in_rows(pattern.best_mask(score), gram)

        spectrum, basis = eigh(gram)
        targets = rows @ gram
        kept = before = support(rows)
        sparse, price, penalty = rows * kept, torch.zeros_like(rows), self.penalty
        for step in range(1, self.steps + 1):
            free = (targets - price + penalty * sparse) @ basis / (spectrum[:, None] + penalty) @ basis.mT
            kept = support(free + price / penalty)
            sparse = (free + price / penalty) * kept
            price = price + penalty * (free - sparse)
            if step % _STEPS_BETWEEN_CHANGES == 0:
                change = float((kept != before).sum()) / max(int(kept.sum()), 1)
                if change == 0:
                    break
                penalty *= _raised_by(change)
                before = kept
        return kept


def _raised_by(change: float) -> float:
    """The factor by which the penalty rises after this share of the support changed."""
    if change > 0.1:
        return 1.3
    return 1.2 if change > 0.005 else 1.1
