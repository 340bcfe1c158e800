"""SparseGPT (Frantar and Alistarh 2023): one sweep over the columns; those to the right make up for what goes.

With U the upper Cholesky factor of the inverse Hessian, U_jj^2 is [(H_{j:, j:})^-1]_jj: the inverse of what is still
free when column j is reached. So one factor serves all rows and all columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..linalg.gram import damped
from ..linalg.rows import as_rows, from_rows, inverse
from ..patterns.base import NM, Pattern, keep_best
from . import Choice, Reads


@dataclass(frozen=True)
class SparseGPT:
    damping: float = 0.01  # relative to the mean diagonal of the Gram matrix
    block: int = 128  # columns whose unstructured mask is chosen together
    reads: Reads = "auto"

    def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Pattern) -> Choice:
        rows, gram = as_rows(weight, gram)
        rows = rows.clone()  # changed in place below
        factor = torch.linalg.cholesky(inverse(damped(gram, self.damping)), upper=True)
        step = self._step(pattern)
        kept = torch.ones_like(rows, dtype=torch.bool)
        removed = 0
        for begin in range(0, rows.shape[-1], step):
            end = min(begin + step, rows.shape[-1])
            here = slice(begin, end)
            pivots = factor.diagonal(dim1=1, dim2=2)[:, None, here]
            saliency = (rows[..., here] / pivots).square()
            if isinstance(pattern, NM):
                kept[..., here] = pattern.best_mask(saliency.reshape(-1, end - begin)).view_as(saliency)
            else:  # exact in all, whatever each block is rounded to
                wanted = round(pattern.sparsity * rows.numel() * end / rows.shape[-1])
                kept[..., here] = keep_best({"": saliency}, (wanted - removed) / saliency.numel())[""]
                removed = wanted
            errors = torch.zeros_like(saliency)
            for column in range(begin, end):
                gone = rows[..., column] * ~kept[..., column]
                error = gone / factor[:, None, column, column]
                rows[..., column:end] -= error[..., None] * factor[:, None, column, column:end]
                rows[..., column] *= kept[..., column]
                errors[..., column - begin] = error
            rows[..., end:] -= errors @ factor[:, here, end:]
        return Choice({name: from_rows(kept, weight)}, {name: from_rows(rows, weight)})

    def _step(self, pattern: Pattern) -> int:
        """Of N:M, one group at a time: each is chosen with the weights as they are when the sweep arrives there."""
        return pattern.m if isinstance(pattern, NM) else self.block
