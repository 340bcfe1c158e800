"""Linear algebra on large matrices in calls that end soon.

Python notices Ctrl-C between two native calls, not inside of one. On a CPU one call on a matrix of thousands of columns
can take a minute, so it is cut into smaller ones here. Smaller matrices and other devices take torch's own functions.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import products

T = TypeVar("T")

MOST_FLOPS = 3e10  # of one call: a second or two on two cores
_WHOLE = 2048  # columns up to which a matrix is factored in one call
_SYMMETRIC = 512  # rows from which on the symmetry of a product saves time
_INVERTED_WHOLE = 256  # columns up to which a triangular matrix is inverted in one call: products are faster
_PAUSE = 0.1  # seconds between two looks at a thread


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, for matrices or batches of them; some rows of each `a` at a time."""
    return multiplication_by(b, a.shape[-2])(a)


def multiplication_by(b: Tensor, rows: int | None = None) -> products.Multiplication:
    """a -> a @ b, for a `b` that much is multiplied by. `rows`: of `a`, if that is known."""
    multiply = products.multiplication_by(b, rows)

    def in_pieces(a: Tensor) -> Tensor:
        flops = 2.0 * math.prod(a.shape) * b.shape[-1]
        if a.device.type != "cpu" or flops <= MOST_FLOPS:
            return multiply(a)
        rows = max(1, int(a.shape[-2] * MOST_FLOPS / flops))
        return torch.cat([multiply(part) for part in a.split(rows, dim=-2)], dim=-2)

    return in_pieces


def self_product(rows: Tensor) -> Tensor:
    """rows @ rows^T. On a CPU the off-diagonal half of a large one is computed once and copied; a GPU does the whole
    product in less time."""
    if rows.device.type != "cpu" or len(rows) < _SYMMETRIC:
        return product(rows, rows.mT)
    result = rows.new_empty(len(rows), len(rows))
    _fill_symmetric(result, rows.contiguous())
    return result


def _fill_symmetric(result: Tensor, rows: Tensor) -> None:
    if len(rows) < _SYMMETRIC:
        result.copy_(product(rows, rows.mT))
        return
    half = len(rows) // 2
    _fill_symmetric(result[:half, :half], rows[:half])
    _fill_symmetric(result[half:, half:], rows[half:])
    result[:half, half:] = product(rows[:half], rows[half:].mT)
    result[half:, :half] = result[:half, half:].mT


def cholesky(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The lower Cholesky factors of a batch of matrices, and for each 0 where it is positive definite."""
    if _is_small(matrix):
        factor, info = torch.linalg.cholesky_ex(matrix)
        return factor, info
    half = matrix.shape[-1] // 2
    first, info_of_first = cholesky(matrix[..., :half, :half])
    below = _solve_triangular(first, matrix[..., half:, :half].mT).mT
    second, info_of_second = cholesky(matrix[..., half:, half:] - product(below, below.mT))
    factor = torch.zeros_like(matrix)
    factor[..., :half, :half], factor[..., half:, :half], factor[..., half:, half:] = first, below, second
    return factor, torch.where(info_of_first != 0, info_of_first, info_of_second)


def upper_cholesky(matrix: Tensor) -> Tensor:
    """The upper Cholesky factors of a batch of positive definite matrices."""
    if _is_small(matrix):
        factor: Tensor = torch.linalg.cholesky(matrix, upper=True)
        return factor
    return cholesky(matrix)[0].mT


def cholesky_inverse(factor: Tensor) -> Tensor:
    """The inverses of matrices from their lower Cholesky factors."""
    if _is_small(factor):
        return torch.cholesky_inverse(factor)
    root = _triangular_inverse(factor)
    if len(root.flatten(0, -2)) > root.shape[-1]:  # of several
        return product(root.mT, root)
    return self_product(root.flatten(0, -2).mT).view_as(root)


def cholesky_solve(rhs: Tensor, factor: Tensor) -> Tensor:
    """Solve for some right-hand sides (columns) at a time, from lower Cholesky factors."""
    flops = 2.0 * math.prod(factor.shape) * rhs.shape[-1]
    if rhs.device.type != "cpu" or flops <= MOST_FLOPS:
        return torch.cholesky_solve(rhs, factor)
    columns = max(1, int(rhs.shape[-1] * MOST_FLOPS / flops))
    return torch.cat([torch.cholesky_solve(part, factor) for part in rhs.split(columns, dim=-1)], dim=-1)


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of symmetric matrices. These cannot be cut: large ones are left to a thread."""
    if _is_small(matrix):
        values, vectors = torch.linalg.eigh(matrix)
        return values, vectors
    values, vectors = _in_a_thread(lambda: torch.linalg.eigh(matrix))
    return values, vectors


def _is_small(matrix: Tensor) -> bool:
    return matrix.device.type != "cpu" or matrix.shape[-1] <= _WHOLE


def _solve_triangular(factor: Tensor, rhs: Tensor) -> Tensor:
    columns = max(1, int(MOST_FLOPS / math.prod(factor.shape)))
    parts = [torch.linalg.solve_triangular(factor, part, upper=False) for part in rhs.split(columns, dim=-1)]
    return torch.cat(parts, dim=-1)


def _triangular_inverse(factor: Tensor) -> Tensor:
    """By halves: of [[A, 0], [B, C]] it is [[A⁻¹, 0], [-C⁻¹ B A⁻¹, C⁻¹]]."""
    size = factor.shape[-1]
    if size <= _INVERTED_WHOLE:
        identity = torch.eye(size, dtype=factor.dtype, device=factor.device).expand_as(factor)
        return _solve_triangular(factor, identity)
    half = size // 2
    first, second = _triangular_inverse(factor[..., :half, :half]), _triangular_inverse(factor[..., half:, half:])
    result = torch.zeros_like(factor)
    result[..., :half, :half], result[..., half:, half:] = first, second
    result[..., half:, :half] = -product(product(second, factor[..., half:, :half]), first)
    return result


def _in_a_thread(work: Callable[[], T]) -> T:
    """Run one native call beside the main thread, which so notices Ctrl-C. The call then ends by itself, unheard."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            with torch.no_grad():
                outcome["value"] = work()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, name="snows native call", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_PAUSE)
    if "error" in outcome:
        raise outcome["error"]
    value: T = outcome["value"]
    return value
