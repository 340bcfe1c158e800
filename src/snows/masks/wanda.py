"""Wanda (Sun et al. 2023): weight times the norm of its input, compared within each output row; no new weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..patterns.base import NM, Pattern
from . import Choice, Reads


@dataclass(frozen=True)
class Wanda:
    reads: Reads = "pruned"

    def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Pattern) -> Choice:
        norms = gram.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt().to(weight.dtype)  # groups x columns
        rows_per_group = weight.shape[0] // gram.shape[0]
        score = weight.abs() * norms.repeat_interleave(rows_per_group, dim=0).view_as(weight)
        if isinstance(pattern, NM):
            return Choice({name: pattern.best_mask(score)})
        return Choice({name: _best_of_each_row(score, pattern.sparsity)})


def _best_of_each_row(score: Tensor, sparsity: float) -> Tensor:
    """The same share of every row, to the weight: what rounding leaves over goes to the first rows."""
    rows = score.shape[0]
    removed = round(sparsity * score.numel())
    counts = torch.full((rows, 1), removed // rows, device=score.device)
    counts[: removed % rows] += 1
    rank = score.flatten(1).argsort(dim=1, stable=True).argsort(dim=1, stable=True)
    return (rank >= counts).view_as(score)
