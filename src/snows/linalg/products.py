"""Large products of matrices on a CPU.

torch leaves them to MKL, which on AMD's processors runs at half of their speed. oneDNN, which comes with torch for
convolutions, runs at full speed on both kinds (4608 columns, one core of an EPYC: 240 instead of 110 GFLOP/s).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_LARGE = 256  # rows and columns from which on the copies that oneDNN needs are paid for

Multiplication = Callable[[Tensor], Tensor]


def multiplication_by(matrix: Tensor, rows: int | None = None) -> Multiplication:
    """a -> a @ matrix, for a matrix or a batch of them.

    `rows` is how many rows `a` has; None: many, at one time or another.
    """
    if not _by_onednn(matrix) or min(*matrix.shape[-2:], _LARGE if rows is None else rows) < _LARGE:
        return lambda a: a @ matrix
    batch, packed = matrix.shape[:-2], _packed(matrix.flatten(0, -2).mT)
    return lambda a: F.linear(_packed(a.flatten(0, -2)), packed).to_dense().unflatten(0, (*batch, -1))


def _by_onednn(matrix: Tensor) -> bool:
    """It takes single matrices, or batches of one."""
    backend = torch.backends.mkldnn
    usable = bool(backend.is_available() and backend.enabled)
    single = matrix.shape[:-2].numel() == 1
    return usable and single and matrix.device.type == "cpu" and matrix.dtype == torch.float32


def _packed(matrix: Tensor) -> Tensor:
    return matrix.detach().to_mkldnn()
