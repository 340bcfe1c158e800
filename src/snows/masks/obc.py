"""OBC, also called ExactOBS: greedy elimination row by row, then least squares on what is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..linalg.gram import damped
from ..linalg.rows import as_rows, from_rows, inverse, least_squares
from ..patterns import Pattern
from .base import Choice, Reads, Takes, require_pattern
from .elimination import eliminate

_WIDE = 2048  # with more columns the elimination runs in single precision


@dataclass(frozen=True)
class OBC:
    """Removes one weight of a row at a time, the one that costs least once all others make up for it.

    Frantar and Alistarh 2022, "Optimal Brain Compression" (there: ExactOBS).

    Args:
        damping: Added to the Gram matrix, relative to its mean diagonal.
        reads: Which inputs the Gram matrix is of, see `snows.LayerMethod`; the published method reads "dense".

    Example:
        >>> import torch, snows
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
        >>> result = snows.prune(model, torch.randn(64, 8), "1:4", mask=snows.OBC(), layers="0", progress=False)
        >>> int(result.masks["0.weight"].sum())
        8
    """

    damping: float = 0.01
    reads: Reads = "auto"
    takes: ClassVar[Takes] = "single weights"

    def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Pattern) -> Choice:
        require_pattern(self, {name: pattern})
        rows, gram = as_rows(weight, gram)
        gram = damped(gram, self.damping)
        kept = self._kept(rows, gram, pattern)
        refitted = least_squares(rows, gram, kept)
        return Choice({name: from_rows(kept, weight)}, {name: from_rows(refitted, weight)})

    @staticmethod
    def _kept(rows: Tensor, gram: Tensor, pattern: Pattern) -> Tensor:
        flat, columns = rows.flatten(0, 1), rows.shape[-1]
        which = torch.arange(len(rows), device=rows.device).repeat_interleave(rows.shape[1])
        start = inverse(gram)
        if columns > _WIDE:
            flat, start = flat.float(), start.float()
        if pattern.group is not None:
            steps = columns * pattern.group.removed // pattern.group.size
            counts = torch.full((len(flat),), steps, device=rows.device)
            return eliminate(flat, start, which, steps, pattern.group).kept(columns, counts).view_as(rows)
        # The cheapest steps of all rows are taken. A row takes its steps in their order, whatever each of them costs
        # (costs do not always rise), so only how many of them are among the cheapest matters.
        elimination = eliminate(flat, start, which, columns)
        cheapest = elimination.losses.flatten().argsort(stable=True)[: round(pattern.sparsity * flat.numel())]
        counts = torch.bincount(cheapest // columns, minlength=len(flat))
        return elimination.kept(columns, counts).view_as(rows)
