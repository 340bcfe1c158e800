"""A layer's weight as rows that can be solved one by one, which is how layer-wise methods see it.

Columns are ordered by kernel position, then input channel, so that the M inputs of an N:M group lie side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..devices.working_memory import bytes_at_once
from ..errors import StatisticsError
from .gram import kept_blocks
from .large import cholesky, cholesky_inverse

_COPIES = 3  # of the blocks, while they are solved


def as_rows(weight: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """Weight (groups x rows x columns) and Gram matrix (groups x columns x columns), in the Gram matrix's precision.

    `gram` comes with its columns in the order of the flattened weight.
    """
    order = torch.arange(gram.shape[-1], device=gram.device).view(weight.shape[1], -1).T.flatten()
    return in_rows(weight, gram).to(gram.dtype), gram[:, order[:, None], order]


def in_rows(values: Tensor, gram: Tensor) -> Tensor:
    """Values of a weight's shape, such as a mask, as groups x rows x columns on the device of the Gram matrix."""
    return values.movedim(1, -1).reshape(gram.shape[0], -1, gram.shape[-1]).to(gram.device)


def from_rows(rows: Tensor, like: Tensor) -> Tensor:
    """Rows back in the shape, device, memory layout and (if they are no mask) dtype of the weight `like`."""
    shape = like.movedim(1, -1).shape
    dtype = rows.dtype if rows.dtype == torch.bool else like.dtype
    # The captured graph views activations whose memory layout follows that of the weight.
    return torch.empty_like(like, dtype=dtype).copy_(rows.reshape(shape).movedim(-1, 1))


def inverse(gram: Tensor) -> Tensor:
    """The inverse of positive definite matrices."""
    factor, info = cholesky(gram)
    if info.any():
        raise StatisticsError("a Gram matrix is not positive definite; it needs more damping")
    return cholesky_inverse(factor)


def least_squares(rows: Tensor, gram: Tensor, kept: Tensor) -> Tensor:
    """For each row, the weights on its kept columns whose outputs are closest to those of the whole row."""
    targets = (rows @ gram).flatten(0, 1)
    result = torch.zeros_like(targets)
    for part in kept_blocks(gram, kept.flatten(0, 1), bytes_at_once(gram.device) // _COPIES):
        at = (part.rows[:, None], part.columns)
        factor = torch.linalg.cholesky(part.gram)
        solved = torch.cholesky_solve((targets[at] * part.real).unsqueeze(-1), factor).squeeze(-1)
        result[at] = solved * part.real
    return result.view_as(rows)
