"""ALPS (Meng et al. 2024): the layer's least squares under its pattern, by ADMM with a rising penalty, then CG.

B follows the least squares, D follows the pattern, V prices their difference; as the penalty rho grows they meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..linalg.gram import damped
from ..linalg.rows import as_rows, from_rows, least_squares
from ..patterns.base import Pattern
from . import Choice, Reads

_STEPS_BETWEEN_CHANGES = 3


@dataclass(frozen=True)
class ALPS:
    damping: float = 0.01  # relative to the mean diagonal of the Gram matrix
    penalty: float = 0.1  # at the start, with inputs scaled to unit norm
    steps: int = 300
    reads: Reads = "auto"

    def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Pattern) -> Choice:
        rows, gram = as_rows(weight, gram)
        gram = damped(gram, self.damping)
        norms = gram.diagonal(dim1=1, dim2=2).sqrt()
        scaled = gram / (norms[:, :, None] * norms[:, None, :])
        kept = self._admm(rows * norms[:, None], scaled, pattern, weight)
        # the published method ends with a few masked CG steps on this least-squares problem; this is where they lead
        return Choice({name: from_rows(kept, weight)}, {name: from_rows(least_squares(rows, gram, kept), weight)})

    def _admm(self, rows: Tensor, gram: Tensor, pattern: Pattern, like: Tensor) -> Tensor:
        def support(values: Tensor) -> Tensor:
            mask = pattern.best_mask(from_rows(values.abs(), torch.empty_like(like, dtype=values.dtype)))
            return mask.to(rows.device).movedim(1, -1).reshape(rows.shape)

        spectrum, basis = torch.linalg.eigh(gram)
        wanted = rows @ gram
        kept = support(rows)
        sparse, price, penalty = rows * kept, torch.zeros_like(rows), self.penalty
        before = kept
        for step in range(1, self.steps + 1):
            free = (wanted - price + penalty * sparse) @ basis / (spectrum[:, None] + penalty) @ basis.mT
            kept = support(free + price / penalty)
            sparse = (free + price / penalty) * kept
            price = price + penalty * (free - sparse)
            if step % _STEPS_BETWEEN_CHANGES == 0:
                change = float((kept != before).sum()) / max(int(kept.sum()), 1)
                if change == 0:
                    break
                penalty *= 1.3 if change > 0.1 else 1.2 if change > 0.005 else 1.1
                before = kept
        return kept
