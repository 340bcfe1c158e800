"""Least squares row by row: the closed form of the K=0 problem, and a preconditioner from the same factors.

Each output (row) of a layer is a linear function of its inputs, so the K=0 loss is a sum over rows. Row r solves its
own normal equations on the inputs it keeps: gram[kept_r, kept_r] w_r = cross[kept_r].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import StatisticsError
from ..linalg.gram import inverted, kept_blocks
from .cg import CGOptions, Product, conjugate_gradient

_DAMPING_RETRIES = 12
# Above these, blocks are not factored and conjugate gradients on the Gram matrix are used instead. A classifier of
# VGG's size is above: 4,096 rows of 12,544 kept inputs.
_MAX_FLOPS = {"cpu": 1e12, "cuda": 5e13}
_MAX_BYTES = {"cpu": 4 << 30, "cuda": 24 << 30}


@dataclass(frozen=True)
class Refit:
    """Least-squares weights, and the relative damping that was needed."""

    weight: Tensor
    relative_damping: float


class RowBlocks:
    """The blocks gram[kept_r, kept_r] of all rows r, inverted. If that is too large, only their diagonals are used."""

    def __init__(
        self,
        gram: Tensor,
        kept: Tensor,
        relative_damping: float,
        dtype: torch.dtype,
        device_bytes: int | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        """Factor the blocks.

        Args:
            gram: groups x columns x columns.
            kept: rows x columns, True where a weight is kept.
            relative_damping: A share of the mean diagonal, added to every diagonal. It is raised where blocks are
                singular.
            dtype: Of the inverses.
            device_bytes: Inverses that are larger are offloaded to host memory.
            chunk_bytes: How much is inverted at once.

        Raises:
            StatisticsError: The Gram matrix is not finite, or stays singular.
        """
        self.gram, self.kept, self.dtype = gram, kept.to(gram.device), dtype
        self.relative_damping = relative_damping
        # If every input is zero any scale will do: the damping alone keeps the weights where they are.
        self.mean_diagonal = float(gram.diagonal(dim1=1, dim2=2).mean()) or 1.0
        if not torch.isfinite(gram).all():
            raise StatisticsError("the layer's inputs are not finite (NaN or infinity in the data or an earlier layer)")
        self.rows_per_group = kept.shape[0] // gram.shape[0]
        counts = kept.sum(1).double()
        most_flops, most_bytes = (limits.get(gram.device.type, limits["cpu"]) for limits in (_MAX_FLOPS, _MAX_BYTES))
        size = float(counts.pow(2).sum()) * dtype.itemsize
        self.exact = float(counts.pow(3).sum()) / 3 <= most_flops and size <= most_bytes
        self.offloads = device_bytes is not None and size > device_bytes
        self._chunk_bytes = chunk_bytes
        self._inverses: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, columns, inverses
        if self.exact:
            self._factor()
        self.trace = self._row_traces()

    def solve(self, rhs: Tensor) -> Tensor:
        """Apply the inverse blocks to rhs (rows x columns)."""
        device, rhs = rhs.device, rhs.to(self.gram.device)
        if not self.exact:
            diagonal = self._diagonal() + self.relative_damping * self.mean_diagonal
            return (rhs * self.kept / diagonal.to(rhs.dtype)).to(device)
        result = torch.zeros_like(rhs)
        for rows, columns, inverse in self._inverses:
            gathered = rhs[rows[:, None], columns].to(self.dtype)
            inverse = inverse.to(rhs.device, non_blocking=True)
            result[rows[:, None], columns] = (inverse @ gathered.unsqueeze(-1)).squeeze(-1).to(rhs.dtype)
        return (result * self.kept).to(device)

    def refit(self, weight: Tensor, cross: Tensor) -> Refit:
        """The least-squares weights on the kept inputs, damped towards `weight` (rows x columns).

        By conjugate gradients, preconditioned with the inverse blocks. Where these are exact a few steps are enough:
        they only remove the rounding of the inverses.
        """
        start = weight.to(self.gram.device).to(self.gram.dtype) * self.kept
        residual = (self._cross_rows(cross) - self._apply_gram(start)) * self.kept
        options = CGOptions(max_steps=15 if self.exact else 50, relative_tolerance=1e-12 if self.exact else 1e-4)
        damping = self.relative_damping * self.mean_diagonal
        product: Product = lambda v: self._apply_gram(v) * self.kept  # noqa: E731
        change = conjugate_gradient(product, residual, options, self.solve, damping).solution
        return Refit((start + change).to(weight.dtype).to(weight.device), self.relative_damping)

    def _factor(self) -> None:
        """Invert every block. The damping is raised until all of them are positive definite."""
        for _ in range(_DAMPING_RETRIES):
            self._inverses = []
            for part in kept_blocks(self.gram, self.kept, self._chunk_bytes):
                part.gram.diagonal(dim1=1, dim2=2).add_(self.relative_damping * self.mean_diagonal)
                inverse = inverted(part.gram)
                if inverse is None:
                    break
                self._inverses.append((part.rows, part.columns, self._stored(inverse.to(self.dtype))))
            else:
                return
            self.relative_damping = max(10 * self.relative_damping, 1e-10)
        raise StatisticsError(
            f"the layer's input statistics stay singular at a relative damping of {self.relative_damping:g}; "
            "are all calibration samples the same?"
        )

    def _stored(self, inverse: Tensor) -> Tensor:
        """The inverse on the device, or offloaded to host memory."""
        if not self.offloads or inverse.device.type == "cpu":
            return inverse
        on_host = torch.empty_like(inverse, device="cpu", pin_memory=inverse.device.type == "cuda")
        return on_host.copy_(inverse, non_blocking=True)

    def _diagonal(self) -> Tensor:
        return self.gram.diagonal(dim1=1, dim2=2).repeat_interleave(self.rows_per_group, dim=0)

    def _row_traces(self) -> Tensor:
        return (self._diagonal() * self.kept).sum(1)

    def _apply_gram(self, weight: Tensor) -> Tensor:
        grouped = weight.unflatten(0, (self.gram.shape[0], -1))
        product: Tensor = (grouped @ self.gram).flatten(0, 1)
        return product

    @staticmethod
    def _cross_rows(cross: Tensor) -> Tensor:
        """groups x columns x outputs of a group, as rows x columns."""
        return cross.transpose(1, 2).flatten(0, 1)


class RowPreconditioner:
    """Row blocks, scaled to a true product: row r of B is about scale_r * gram[kept_r, kept_r].

    One Rademacher probe z estimates the trace of every row of B as z_r . (B z)_r (Hutchinson). The estimate is noisy,
    and even negative, where rows interact. If rows are similar (`similar_rows`), each estimate moves half of the way to
    the mean of all rows. One entry of each sequence belongs to one of the weights that are solved together.
    """

    def __init__(
        self,
        blocks: Sequence[RowBlocks],
        probes: Sequence[Tensor],
        products_of_probes: Sequence[Tensor],
        similar_rows: bool = False,
    ) -> None:
        pairs = zip(probes, products_of_probes, strict=True)
        traces = [(probe * product).flatten(1).sum(1).double().clamp(min=0) for probe, product in pairs]
        mean = float(torch.cat(traces).mean())
        if similar_rows:
            traces = [(trace + mean) / 2 for trace in traces]
        traces = [trace.clamp(min=1e-3 * mean or 1e-30) for trace in traces]
        self._blocks = blocks
        self._scales = [
            (block.trace.double().clamp(min=1e-30).to(trace.device) / trace).to(probe.dtype)[:, None]
            for block, trace, probe in zip(blocks, traces, probes, strict=True)
        ]
        kept = sum(int(block.kept.sum()) for block in blocks)
        self.mean_diagonal = sum(float(trace.sum()) for trace in traces) / kept

    def __call__(self, residuals: Sequence[Tensor]) -> list[Tensor]:
        parts = zip(self._blocks, residuals, self._scales, strict=True)
        return [(blocks.solve(part.flatten(1)) * scale).view_as(part) for blocks, part, scale in parts]
