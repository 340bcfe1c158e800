"""A layer's weight as rows that are solved for themselves: linear algebra and memory that layer methods share."""

from __future__ import annotations

import torch
from torch import Tensor

from ..devices.working_memory import bytes_at_once
from .gram import kept_blocks

_COPIES = 3  # of blocks while they are solved


def as_rows(weight: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and Gram matrix in double precision: groups x rows x columns, and groups x columns x columns.

    Columns are ordered by kernel position, then channel: the M inputs of an N:M group lie side by side.
    """
    rows = weight.movedim(1, -1).reshape(gram.shape[0], -1, gram.shape[-1])
    order = torch.arange(gram.shape[-1], device=gram.device).view(weight.shape[1], -1).T.flatten()
    return rows.to(gram.device, gram.dtype), gram[:, order[:, None], order]


def from_rows(rows: Tensor, like: Tensor) -> Tensor:
    """Back from rows to the layer's own shape (and, for weights, dtype) and device."""
    shape = like.movedim(1, -1).shape
    kind = rows.dtype if rows.dtype == torch.bool else like.dtype
    # In the memory layout of the weight: the captured graph views activations that take their layout from it.
    return torch.empty_like(like, dtype=kind).copy_(rows.reshape(shape).movedim(-1, 1))


def inverse(gram: Tensor) -> Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(gram))


def least_squares(rows: Tensor, gram: Tensor, kept: Tensor) -> Tensor:
    """For each row the weights on its kept columns whose outputs come closest to those of the whole row."""
    wanted = (rows @ gram).flatten(0, 1)
    result = torch.zeros_like(wanted)
    for part in kept_blocks(gram, kept.flatten(0, 1), bytes_at_once(gram.device) // _COPIES):
        at = (part.rows[:, None], part.columns)
        factor = torch.linalg.cholesky(part.gram)
        solved = torch.cholesky_solve((wanted[at] * part.real).unsqueeze(-1), factor).squeeze(-1)
        result[at] = solved * part.real
    return result.view_as(rows)
