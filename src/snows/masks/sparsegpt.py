"""SparseGPT: one sweep over the columns, in which those to the right make up for what is removed.

With U the upper Cholesky factor of the inverse Hessian, U_jj^2 is [(H_{j:, j:})^-1]_jj: the inverse of what is still
free when the sweep reaches column j. So one factor serves all rows and all columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..linalg.gram import damped
from ..linalg.large import upper_cholesky
from ..linalg.rows import as_rows, from_rows, inverse
from ..patterns import Pattern, without_lowest
from .base import Choice, Reads, Takes, require_pattern


@dataclass(frozen=True)
class SparseGPT:
    """Removes the weights that cost least in one sweep over a layer's columns, updating the columns still to come.

    Frantar and Alistarh 2023, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot".

    Args:
        damping: Added to the Gram matrix, relative to its mean diagonal.
        block: How many columns are compared at once under an unstructured pattern; N:M compares one group at a time.
        reads: Which inputs the Gram matrix is of, see `snows.LayerMethod`.

    Example:
        >>> import torch, snows
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
        >>> method = snows.SparseGPT(block=4)
        >>> result = snows.prune(model, torch.randn(64, 8), 0.5, mask=method, layers="0", progress=False)
        >>> int(result.masks["0.weight"].sum())
        16
    """

    damping: float = 0.01
    block: int = 128
    reads: Reads = "auto"
    takes: ClassVar[Takes] = "single weights"

    def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Pattern) -> Choice:
        require_pattern(self, {name: pattern})
        rows, gram = as_rows(weight, gram)
        rows = rows.clone()  # changed in place below
        factor = upper_cholesky(inverse(damped(gram, self.damping)))
        # The groups of N:M come one by one: each is chosen from the weights as the sweep has changed them.
        step = self.block if pattern.group is None else pattern.group.size
        kept = torch.ones_like(rows, dtype=torch.bool)
        removed = 0
        for begin in range(0, rows.shape[-1], step):
            end = min(begin + step, rows.shape[-1])
            pivots = factor.diagonal(dim1=1, dim2=2)[:, None, begin:end]
            saliency = (rows[..., begin:end] / pivots).square()
            if pattern.group is not None:
                here = pattern.best_mask(saliency.reshape(-1, end - begin)).view_as(saliency)
            else:  # so many that the total is exact, whatever the blocks are rounded to
                removed_by_now = round(pattern.sparsity * rows.numel() * end / rows.shape[-1])
                here = without_lowest(saliency, removed_by_now - removed)
                removed = removed_by_now
            kept[..., begin:end] = here
            _sweep(rows, here, factor, begin)
        return Choice({name: from_rows(kept, weight)}, {name: from_rows(rows, weight)})


def _sweep(rows: Tensor, kept: Tensor, factor: Tensor, begin: int) -> None:
    """Remove the weights of one block from the rows, in place, column by column, and update all columns behind."""
    end = begin + kept.shape[-1]
    errors = torch.zeros_like(kept, dtype=rows.dtype)
    for column in range(begin, end):
        kept_here = kept[..., column - begin]
        error = rows[..., column] * ~kept_here / factor[:, None, column, column]
        rows[..., column:end] -= error[..., None] * factor[:, None, column, column:end]
        rows[..., column] *= kept_here
        errors[..., column - begin] = error
    rows[..., end:] -= errors @ factor[:, begin:end, end:]
