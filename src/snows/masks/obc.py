"""OBC / ExactOBS (Frantar and Alistarh 2022): greedy elimination row by row, then least squares on what is left."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..linalg.gram import damped
from ..linalg.rows import as_rows, from_rows, inverse, least_squares
from ..patterns.base import NM, Pattern
from . import Choice, Reads
from .elimination import eliminate

_WIDE = 2048  # beyond this many columns the elimination runs in single precision


@dataclass(frozen=True)
class OBC:
    damping: float = 0.01  # relative to the mean diagonal of the Gram matrix
    reads: Reads = "auto"  # the published method reads "dense"

    def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Pattern) -> Choice:
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
        if isinstance(pattern, NM):
            group = (pattern.m, pattern.m - pattern.n)
            steps = columns * group[1] // group[0]
            counts = torch.full((len(flat),), steps, device=rows.device)
            return eliminate(flat, start, which, steps, group).kept(columns, counts).view_as(rows)
        # Each row gives up what costs it least. A row's steps are taken in their order, whatever they cost, so a step
        # stands for all before it: the losses of a row are not always rising.
        found = eliminate(flat, start, which, columns)
        cheapest = found.losses.flatten().argsort(stable=True)[: round(pattern.sparsity * flat.numel())]
        counts = torch.bincount(cheapest // columns, minlength=len(flat))
        return found.kept(columns, counts).view_as(rows)
