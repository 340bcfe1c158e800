"""Gram matrices: made positive definite, cut to the kept columns of each row of a weight, and inverted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from .large import cholesky, cholesky_inverse

CHUNK_BYTES = {"cpu": 1 << 24, "cuda": 1 << 30}  # held at once: caches like small chunks, kernel launches large ones
_DAMPING_TRIES = 12
_UNSPLIT_COLUMNS = 128  # on a GPU, larger blocks are inverted as halves


@dataclass(frozen=True)
class KeptBlocks:
    """The Gram matrices of some rows (b), each cut to the row's kept columns (k).

    Rows that keep fewer columns are padded with columns that are coupled to nothing. The caller may change `gram`.
    """

    rows: Tensor  # b
    columns: Tensor  # b x k
    real: Tensor  # b x k, False where padded
    gram: Tensor  # b x k x k


def kept_blocks(gram: Tensor, kept: Tensor, most_bytes: int | None = None) -> Iterator[KeptBlocks]:
    """The blocks of all rows, in chunks of bounded size.

    Rows that keep equally many columns come together, whatever their group: depthwise convolutions have as many groups
    as channels. `gram` is groups x columns x columns; `kept` is rows x columns, the rows of one group after those of
    another.
    """
    group_of = torch.arange(len(kept), device=kept.device) // (len(kept) // len(gram))
    chunk_bytes = CHUNK_BYTES.get(gram.device.type, CHUNK_BYTES["cpu"])
    if most_bytes is not None:
        chunk_bytes = min(chunk_bytes, most_bytes)
    mean_diagonal = float(gram.diagonal(dim1=1, dim2=2).mean()) or 1.0
    counts = kept.sum(1)
    columns = (~kept).to(torch.uint8).argsort(dim=1, stable=True)  # kept ones first, in order
    order = counts.argsort(stable=True)
    widest = max(int(counts[order[-1]]), 1)
    for rows in order.split(max(1, chunk_bytes // (widest**2 * gram.element_size()))):
        narrow, wide = torch.stack(counts[rows].aminmax()).tolist()
        width = max(wide, 1)
        chosen = columns[rows, :width]
        block = gram[group_of[rows, None, None], chosen[:, :, None], chosen[:, None, :]]
        real = torch.arange(width, device=rows.device) < counts[rows, None]
        if narrow < width:
            block *= real[:, :, None] & real[:, None, :]
            block.diagonal(dim1=1, dim2=2).add_(~real, alpha=mean_diagonal)
        yield KeptBlocks(rows, chosen, real, block)


def inverted(blocks: Tensor) -> Tensor | None:
    """The inverses of blocks (b x k x k); None if one of them is not positive definite."""
    if blocks.device.type != "cuda":
        factor, info = cholesky(blocks)
        return None if info.any() else cholesky_inverse(factor)
    # On a GPU torch inverts one block after another. Products of halves take a fifth of the time.
    root, infos = inverse_root(blocks)
    return None if torch.cat(infos).any() else root.mT @ root


def inverse_root(blocks: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The inverse of each block's Cholesky factor, by halves, and the `info` of every factorization."""
    size = blocks.shape[-1]
    if size <= _UNSPLIT_COLUMNS:
        factor, info = torch.linalg.cholesky_ex(blocks)
        identity = torch.eye(size, dtype=blocks.dtype, device=blocks.device).expand_as(blocks)
        return torch.linalg.solve_triangular(factor, identity, upper=False), [info]
    half = size // 2
    first, infos = inverse_root(blocks[:, :half, :half])
    below = blocks[:, half:, :half] @ first.mT
    second, infos_of_second = inverse_root(torch.baddbmm(blocks[:, half:, half:], below, below.mT, alpha=-1))
    root = torch.zeros_like(blocks)
    root[:, :half, :half], root[:, half:, half:] = first, second
    root[:, half:, :half] = -(second @ below) @ first
    return root, infos + infos_of_second


def damped(gram: Tensor, relative: float) -> Tensor:
    """`gram` plus `relative` times its mean diagonal; times ten until the result is positive definite.

    Raises:
        InputError: if it is not finite, or stays singular.
    """
    if not torch.isfinite(gram).all():
        raise InputError("the layer's inputs are not finite (NaN or infinity in the data or in an earlier layer)")
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    scale = gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # if every input is dead, any scale will do
    for _ in range(_DAMPING_TRIES):
        tried = relative
        result = gram + tried * scale * identity
        if not cholesky(result)[1].any():
            return result
        relative = max(10 * tried, 1e-10)
    raise InputError(
        f"the layer's input statistics stay singular at a relative damping of {tried:g}; "
        "are all calibration samples the same?"
    )
