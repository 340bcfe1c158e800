"""The empirical Fisher matrix, F = damping I + G'G / N with N gradients as the rows of G: what its methods share.

It is cut into diagonal blocks, consecutive slices of a layer's weights. Where N is smaller than a block, F is never
formed: (damping I + G'G / N)^-1 = (I - G'(N damping I + GG')^-1 G) / damping.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from ..linalg.gram import CHUNK_BYTES


class FisherBlock:
    """One block, in double precision. `gradients` (G) is N x b."""

    def __init__(self, gradients: Tensor, damping: float) -> None:
        self.gradients, self.damping = gradients.double(), damping
        self._small = _factor(self.gradients @ self.gradients.T, len(gradients) * damping)

    def solve(self, vector: Tensor) -> Tensor:
        """F^-1 v."""
        inner = torch.cholesky_solve((self.gradients @ vector)[:, None], self._small).squeeze(1)
        result: Tensor = (vector - self.gradients.T @ inner) / self.damping
        return result

    def inverse_diagonal(self) -> Tensor:
        """The diagonal of F^-1."""
        half = torch.linalg.solve_triangular(self._small, self.gradients, upper=False)
        result: Tensor = (1 - half.square().sum(0)).clamp(min=torch.finfo(torch.double).eps) / self.damping
        return result


def fisher_blocks(gradients: Tensor, damping: float) -> Tensor:
    """F itself, for many small blocks at once: gradients of N x blocks x b give blocks x b x b."""
    g = gradients.transpose(0, 1)
    limit = CHUNK_BYTES.get(g.device.type, CHUNK_BYTES["cpu"])
    # In single precision the products can be off by more than a small damping, and then not positive definite.
    parts = (part.double() for part in g.split(max(1, limit // (8 * g[0].numel()))))
    fisher = torch.cat([part.mT @ part for part in parts]) / g.shape[1]
    return fisher + damping * torch.eye(g.shape[-1], dtype=fisher.dtype, device=g.device)


def joint_update(gradients: Tensor, weight: Tensor, kept: Tensor, damping: float) -> Tensor:
    """The kept weights of one block once all others are removed together: the minimum of the quadratic model.

    With S kept and P pruned: w_S + G_S'(N damping I + G_S G_S')^-1 G_P w_P, the ridge regression of G w on G_S.
    """
    w = weight.double()
    g_kept, missing = gradients.double()[:, kept], gradients.double()[:, ~kept] @ w[~kept]
    small = _factor(g_kept @ g_kept.T, len(gradients) * damping)
    result = torch.zeros_like(w)
    result[kept] = w[kept] + g_kept.T @ torch.cholesky_solve(missing[:, None], small).squeeze(1)
    return result


def slices(size: int, block: int) -> Iterator[slice]:
    """Consecutive slices of nearly equal length, none longer than `block`."""
    count = -(-size // block)
    edges = [size * i // count for i in range(count + 1)]
    return (slice(a, b) for a, b in pairwise(edges))


def _factor(matrix: Tensor, damping: float) -> Tensor:
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    factor: Tensor = torch.linalg.cholesky(matrix + damping * identity)
    return factor
