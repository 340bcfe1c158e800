"""Least squares row by row: the closed form of the K=0 problem, and a preconditioner from the same factors.

Each output (row) of a layer is a linear function of its inputs, so the K=0 loss is a sum over rows. Row r solves its
own normal equations on the inputs it keeps: gram[kept_r, kept_r] w_r = cross[kept_r].

There are two ways, and `row_systems` takes the cheaper one. `RowBlocks` inverts the block of every row: its cost grows
with rows x kept^3. `SharedFactor` factors the whole Gram matrix once and iterates on all rows together: its cost grows
with columns^3 and, for each step, rows x columns^2.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..data.moments import Moments
from ..errors import StatisticsError
from ..linalg.gram import inverted, kept_blocks
from ..linalg.large import multiplication_by, product
from .cg import CGOptions, Product, conjugate_gradient

_DAMPING_RETRIES = 12
# Blocks of more operations or bytes are not inverted, even if the preconditioner would be better by it.
_MAX_FLOPS = {"cpu": 1e12, "cuda": 5e13}
_MAX_BYTES = {"cpu": 4 << 30, "cuda": 24 << 30}
# Blocks of fewer operations are inverted in any case: that takes less than half a second.
_FEW_FLOPS = {"cpu": 1e10, "cuda": 1e12}
_BLOCK_PENALTY = (
    3.0  # an operation of a block takes longer than one of a large product: on a CPU 17 to 26 of 60 GFLOP/s
)
USUAL_STEPS = 40  # of a shared factor: 30 to 60 on layers of ResNet50
_MORE_PRODUCTS = 10  # that Newton-CG takes to the same loss, preconditioned by a shared factor instead of blocks
_MOST_STEPS = 200
_LEAST_GAIN = {torch.float32: 1e-8, torch.float64: 1e-13}  # of a step, as a share of the error that is left
_REFRESH = 5  # steps after which the residual is computed anew, in double precision
_JUDGED = 2  # steps after which a solution is judged: with few samples ResNet50's layers are best after 6 to 10
_FACTOR_DAMPING = 1e-2  # of the shared factor alone, at most; relative
# As a preconditioner it takes some steps of the Chebyshev iteration, for eigenvalues down to a tenth of the largest. An
# odd number of steps is positive definite even if the largest is underestimated.
_CHEBYSHEV_STEPS, _SPECTRUM = 3, 10.0
_POWER_STEPS, _POWER_MARGIN = 8, 1.1

Judge = Callable[[Tensor], float]  # the loss that weights (rows x columns) have on held-out samples


@dataclass(frozen=True)
class Refit:
    """Least-squares weights, and the relative damping that was needed."""

    weight: Tensor
    relative_damping: float
    error_before: float  # squared error of the start, averaged over positions, summed over outputs


class RowSystems(ABC):
    """The normal equations of all rows: gram[kept_r, kept_r] + damping, for every row r.

    Attributes:
        gram: groups x columns x columns.
        kept: rows x columns, True where a weight is kept.
        relative_damping: A share of the mean diagonal, added to every diagonal.
        trace: For each row, of its block.

    Raises:
        StatisticsError: The Gram matrix is not finite.
    """

    def __init__(self, gram: Tensor, kept: Tensor, relative_damping: float) -> None:
        if not torch.isfinite(gram).all():
            raise StatisticsError("the layer's inputs are not finite (NaN or infinity in the data or an earlier layer)")
        self.gram, self.kept = gram, kept.to(gram.device)
        self.relative_damping = relative_damping
        # If every input is zero any scale will do: the damping alone keeps the weights where they are.
        self.mean_diagonal = float(gram.diagonal(dim1=1, dim2=2).mean()) or 1.0
        self.rows_per_group = kept.shape[0] // gram.shape[0]
        diagonal = gram.diagonal(dim1=1, dim2=2).repeat_interleave(self.rows_per_group, dim=0)
        self.trace = (diagonal * self.kept).sum(1)

    @abstractmethod
    def solve(self, rhs: Tensor) -> Tensor:
        """An approximate solution for rhs (rows x columns): linear in it, symmetric and positive definite."""

    @abstractmethod
    def changes(self, residual: Tensor, error: float) -> Iterator[Tensor]:
        """Ever better solutions for a residual (rows x columns) of weights with this squared error.

        The last one is exact, to rounding.
        """

    def refit(self, weight: Tensor, moments: Moments, judge: Judge | None = None) -> Refit:
        """The least-squares weights on the kept inputs, damped towards `weight` (rows x columns).

        With a judge, iterations end where they no longer help on held-out samples. With few samples this is long before
        the exact solution, and generalizes better.
        """
        start = weight.to(self.gram.device).to(self.gram.dtype) * self.kept
        targets = moments.cross.transpose(1, 2).flatten(0, 1)  # rows x columns
        outputs = self.apply_gram(start)
        error = max(moments.energy + float((start * (outputs - 2 * targets)).sum()), 0.0)
        best, least = start, math.inf
        for change in self.changes((targets - outputs) * self.kept, error):
            solution = start + change
            loss = -math.inf if judge is None else judge(solution.to(weight.dtype).to(weight.device))
            if judge is not None and not loss < least:
                break
            best, least = solution, loss
        return Refit(best.to(weight.dtype).to(weight.device), self.relative_damping, error)

    def apply_gram(self, weight: Tensor) -> Tensor:
        """Each row times the Gram matrix of its group."""
        return _by_group(weight, self.gram)

    @property
    def damping(self) -> float:
        return self.relative_damping * self.mean_diagonal


def row_systems(
    gram: Tensor,
    kept: Tensor,
    relative_damping: float,
    dtype: torch.dtype,
    product_flops: float = 0.0,
    device_bytes: int | None = None,
    chunk_bytes: int | None = None,
) -> RowSystems:
    """The cheaper way to solve the rows of a layer.

    Blocks are also the better preconditioner of Newton-CG. To the loss that they reach in 15 products a shared factor
    takes 20 to 30 (ResNet50, layer3.1.conv2 and layer4.1.conv1 at 2:4, K=4). With many samples these products take
    longer than the blocks; with few, the blocks do.

    Args:
        gram: groups x columns x columns.
        kept: rows x columns, True where a weight is kept.
        relative_damping: A share of the mean diagonal, added to every diagonal.
        dtype: Of the factors.
        product_flops: Operations of one curvature product, if Newton-CG will be preconditioned. 0: a closed form alone.
        device_bytes: Inverse blocks that are larger are offloaded to host memory.
        chunk_bytes: How much is inverted at once.
    """
    counts = kept.sum(1).double()
    flops, size = float(counts.pow(3).sum()), float(counts.pow(2).sum()) * torch.finfo(dtype).bits / 8
    columns = gram.shape[-1]
    shared_flops = len(gram) * columns**3 + USUAL_STEPS * 4 * len(kept) * columns**2
    if takes_blocks(flops, size, shared_flops, product_flops, gram.device.type):
        return RowBlocks(gram, kept, relative_damping, dtype, device_bytes, chunk_bytes)
    return SharedFactor(gram, kept, relative_damping, dtype)


def takes_blocks(flops: float, size: float, shared_flops: float, product_flops: float, device: str) -> bool:
    """Whether the rows of a layer are solved in blocks.

    Args:
        flops: To invert all blocks.
        size: Bytes of the inverse blocks.
        shared_flops: Of a shared factor and its usual steps.
        product_flops: As for `row_systems`.
        device: A type of device.
    """
    device = device if device in _MAX_FLOPS else "cpu"
    affordable = flops / 3 <= _MAX_FLOPS[device] and size <= _MAX_BYTES[device]
    with_products = shared_flops + _MORE_PRODUCTS * product_flops
    return affordable and (flops <= _FEW_FLOPS[device] or _BLOCK_PENALTY * flops <= with_products)


class RowBlocks(RowSystems):
    """The blocks gram[kept_r, kept_r] of all rows r, inverted."""

    def __init__(
        self,
        gram: Tensor,
        kept: Tensor,
        relative_damping: float,
        dtype: torch.dtype,
        device_bytes: int | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        """Invert the blocks. The damping is raised where some are singular; see `row_systems` for the arguments."""
        super().__init__(gram, kept, relative_damping)
        self._dtype, self._chunk_bytes = dtype, chunk_bytes
        size = float(kept.sum(1).double().pow(2).sum()) * torch.finfo(dtype).bits / 8
        offloads = device_bytes is not None and size > device_bytes
        self._stored_on = torch.device("cpu") if offloads else gram.device
        self._inverses: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, columns, inverses
        self._factor()

    def solve(self, rhs: Tensor) -> Tensor:
        """Apply the inverse blocks."""
        device, rhs = rhs.device, rhs.to(self.gram.device)
        result = torch.zeros_like(rhs)
        for rows, columns, inverse in self._inverses:
            gathered = rhs[rows[:, None], columns].to(self._dtype)
            inverse = inverse.to(rhs.device, non_blocking=True)
            result[rows[:, None], columns] = (inverse @ gathered.unsqueeze(-1)).squeeze(-1).to(rhs.dtype)
        return (result * self.kept).to(device)

    def changes(self, residual: Tensor, error: float) -> Iterator[Tensor]:
        """A few steps of conjugate gradients remove the rounding of the inverses."""
        options = CGOptions(max_steps=15, relative_tolerance=1e-12)
        gram: Product = lambda v: self.apply_gram(v) * self.kept  # noqa: E731
        yield conjugate_gradient(gram, residual, options, self.solve, self.damping).solution

    def _factor(self) -> None:
        """Invert every block. The damping is raised until all of them are positive definite."""
        for _ in range(_DAMPING_RETRIES):
            self._inverses = []
            for part in kept_blocks(self.gram, self.kept, self._chunk_bytes):
                part.gram.diagonal(dim1=1, dim2=2).add_(self.damping)
                inverse = inverted(part.gram)
                if inverse is None:
                    break
                self._inverses.append((part.rows, part.columns, self._stored(inverse.to(self._dtype))))
            else:
                return
            self.relative_damping = max(10 * self.relative_damping, 1e-10)
        raise _singular(self.relative_damping)

    def _stored(self, inverse: Tensor) -> Tensor:
        """The inverse on the device, or offloaded to host memory."""
        if self._stored_on == inverse.device:
            return inverse
        on_host = torch.empty_like(inverse, device=self._stored_on, pin_memory=inverse.device.type == "cuda")
        return on_host.copy_(inverse, non_blocking=True)


class SharedFactor(RowSystems):
    """One inverse of the whole damped Gram matrix, for all rows: z = kept * (r inverse).

    That is far from the inverses of kept blocks, but a good preconditioner of iterations towards them.
    """

    def __init__(self, gram: Tensor, kept: Tensor, relative_damping: float, dtype: torch.dtype) -> None:
        super().__init__(gram, kept, relative_damping)
        self._gram = gram.to(dtype)
        self._times_gram, self._times_inverse = _multiplication(self._gram), _multiplication(self._inverted())

    def solve(self, rhs: Tensor) -> Tensor:
        """A few steps of the Chebyshev iteration. Unlike conjugate gradients they are a linear function of rhs."""
        r = rhs.to(self._gram.device, self._gram.dtype) * self.kept
        largest = self._largest_eigenvalues
        center, radius = largest * (1 + 1 / _SPECTRUM) / 2, largest * (1 - 1 / _SPECTRUM) / 2
        ratio = center / radius
        share, step = 1 / ratio, self._precondition(r) / center
        x = step
        for _ in range(_CHEBYSHEV_STEPS - 1):
            share, before = 1 / (2 * ratio - share), share
            step = share * before * step + 2 * share / radius * self._precondition(r - self._product(x))
            x = x + step
        return x.to(rhs.device, rhs.dtype)

    def changes(self, residual: Tensor, error: float) -> Iterator[Tensor]:
        """Conjugate gradients on all rows at once, each with its own step lengths.

        One step length for all rows takes several times as many steps. Steps are in working precision; the residual is
        computed anew in double precision now and then, so that rounding does not add up.
        """
        dtype, tiny = self._gram.dtype, torch.finfo(self._gram.dtype).tiny
        least_gain = _LEAST_GAIN[dtype]
        x = torch.zeros_like(residual)
        r = residual.to(dtype)
        z = self._precondition(r)
        p, rz = z, (r * z).sum(1, keepdim=True)
        exact = True  # whether r is the true residual
        for step in range(1, _MOST_STEPS + 1):
            bp = self._product(p)
            eta = rz / (p * bp).sum(1, keepdim=True).clamp(min=tiny)
            x = x + eta * p
            gain = float((eta * rz).double().sum())  # by which the error falls
            error -= gain
            over = gain <= least_gain * error
            if over and exact:
                break
            if step % _JUDGED == 0:
                yield x
            exact = over or step % _REFRESH == 0
            r = self._residual(residual, x).to(dtype) if exact else r - eta * bp
            z = self._precondition(r)
            rz_next = (r * z).sum(1, keepdim=True)
            p, rz = (z if over else z + rz_next / rz.clamp(min=tiny) * p), rz_next
        yield x

    @cached_property
    def _largest_eigenvalues(self) -> Tensor:
        """Of each row's preconditioned block, by the power method: rows x 1."""
        generator = torch.Generator().manual_seed(0)
        v = torch.rand(self.kept.shape, generator=generator).to(self._gram.device, self._gram.dtype) * self.kept
        norms = v.norm(dim=1, keepdim=True)
        for _ in range(_POWER_STEPS):
            v = self._precondition(self._product(v / norms.clamp(min=torch.finfo(v.dtype).tiny)))
            norms = v.norm(dim=1, keepdim=True)
        return torch.where(norms > 0, _POWER_MARGIN * norms, torch.ones_like(norms))

    def _precondition(self, rows: Tensor) -> Tensor:
        return self._times_inverse(rows) * self.kept

    def _product(self, rows: Tensor) -> Tensor:
        return (self._times_gram(rows) + self.damping * rows) * self.kept

    def _residual(self, rhs: Tensor, x: Tensor) -> Tensor:
        return (rhs - self.apply_gram(x) - self.damping * x) * self.kept

    def _inverted(self) -> Tensor:
        """The inverse of the damped Gram matrix. Its kept blocks should be near the inverses of kept blocks.

        For blocks cut at random this needs more damping than the blocks have: d = ridge + removed / trace(d), where
        trace(d) is the mean diagonal of (gram + d)^-1 (free compression, Nica and Speicher 1996). It matters most where
        positions are few: the Gram matrix is then singular while its kept blocks are not. Above 1e-2, layers of
        ResNet50 took more steps, as their masks are not random.
        """
        removed = 1 - float(self.kept.double().mean())
        relative, best = max(self.relative_damping, _FACTOR_DAMPING), None
        for _ in range(_DAMPING_RETRIES):
            damped = self._gram.clone()
            damped.diagonal(dim1=1, dim2=2).add_(relative * self.mean_diagonal)
            inverse = inverted(damped)
            if inverse is None and best is not None:
                return best
            if inverse is None:
                relative *= 10
                continue
            trace = float(inverse.diagonal(dim1=1, dim2=2).mean()) * self.mean_diagonal
            wanted = max(self.relative_damping + removed / trace, torch.finfo(damped.dtype).eps)
            if wanted > relative / 2:
                return inverse
            relative, best = wanted, inverse
        if best is None:
            raise _singular(relative)
        return best


def _by_group(rows: Tensor, matrices: Tensor) -> Tensor:
    """Each row (rows x columns) times the matrix of its group (groups x columns x columns)."""
    return product(rows.unflatten(0, (len(matrices), -1)), matrices).flatten(0, 1)


def _multiplication(matrices: Tensor) -> Callable[[Tensor], Tensor]:
    """The same, for matrices that much is multiplied by."""
    multiply = multiplication_by(matrices)
    return lambda rows: multiply(rows.unflatten(0, (len(matrices), -1))).flatten(0, 1)


def _singular(relative_damping: float) -> StatisticsError:
    return StatisticsError(
        f"the layer's input statistics stay singular at a relative damping of {relative_damping:g}; "
        "are all calibration samples the same?"
    )


class RowPreconditioner:
    """Row blocks, scaled to a true product: row r of B is about scale_r * gram[kept_r, kept_r].

    One Rademacher probe z estimates the trace of every row of B as z_r . (B z)_r (Hutchinson). The estimate is noisy,
    and even negative, where rows interact. If rows are similar (`similar_rows`), each estimate moves half of the way to
    the mean of all rows. One entry of each sequence belongs to one of the weights that are solved together.
    """

    def __init__(
        self,
        blocks: Sequence[RowSystems],
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
