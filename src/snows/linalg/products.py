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


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, for two matrices."""
    if min(*a.shape, b.shape[1]) < _LARGE or not _by_onednn(a):
        return a @ b
    return _linear(a, _packed(b.mT))


def multiplication_by(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """rows -> rows @ matrix, for a symmetric matrix that much is multiplied by."""
    if len(matrix) < _LARGE or not _by_onednn(matrix):
        return lambda rows: rows @ matrix
    packed = _packed(matrix)
    return lambda rows: _linear(rows, packed)


def _by_onednn(matrix: Tensor) -> bool:
    backend = torch.backends.mkldnn
    return (
        bool(backend.is_available() and backend.enabled)
        and matrix.device.type == "cpu"
        and matrix.dtype == torch.float32
    )


def _packed(matrix: Tensor) -> Tensor:
    return matrix.detach().to_mkldnn()


def _linear(rows: Tensor, packed: Tensor) -> Tensor:
    return F.linear(_packed(rows), packed).to_dense()
