"""The K-step loss, its gradient and its curvature products: pure functions of one weight.

F_k(w) is the output of operation k and Y_k its target, for n samples of e_k elements each. The normalizations are

    loss(w) = sum_k c_k * ||Y_k - F_k(w)||^2,    c_k = 1                        "sum": Equation (3) as printed
                                                 c_k = 1 / (n e_k)              "mean"
                                                 c_k = 1 / (n e_k var(Y_k))     "variance": all operations count equally

All of them are sums over pieces (micro-batches), so memory depends on the size of a piece, not on the number of
samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..devices.distributed.ranks import ALONE, Ranks
from ..errors import InputError
from ..graph.autodiff import Forward, LinearMap, linearize

Product = Callable[[Tensor], Tensor]
Linearize = Callable[[Tensor, torch.dtype], tuple[Sequence[Tensor], LinearMap]]
Normalization = Literal["variance", "mean", "sum"]
CurvatureKind = Literal["gauss-newton", "hessian", "fisher"]


@dataclass(frozen=True)
class Piece:
    """One micro-batch: the outputs of the operations as a function of the weight, and their targets.

    Targets are computed when they are first read, as curvature products do not need them. `linearize(weight, dtype)`
    gives the outputs and their Jacobian in that dtype.
    """

    forward: Forward
    compute_targets: Callable[[], tuple[Tensor, ...]]
    samples: int
    linearize: Linearize

    @cached_property
    def targets(self) -> tuple[Tensor, ...]:
        return self.compute_targets()


class Pieces(Protocol):
    """Micro-batches, made when they are read."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Piece: ...


class SampleSplit(Protocol):
    """How to view a tensor as one row per sample."""

    def split(self, value: Tensor, samples: int) -> Tensor: ...


@dataclass(frozen=True)
class Objective:
    """The K-step loss over some pieces.

    `weights` has 1 / var(Y_k) for each operation if the normalization is "variance", else 1. `chosen` are the indices
    of the pieces in the sum.
    """

    pieces: Pieces
    weights: tuple[float, ...]
    normalization: Normalization
    chosen: tuple[int, ...]
    sizes: tuple[int, ...]  # samples in each piece
    layouts: Sequence[SampleSplit | None] = ()
    precision: torch.dtype | None = None  # of Jacobians; None: that of the weight
    ranks: Ranks = ALONE  # who share the pieces; sums over pieces are sums over ranks

    @property
    def samples(self) -> int:
        return sum(self.sizes[index] for index in self.chosen)

    @property
    def samples_of_a_rank(self) -> int:
        """The most that one rank has."""
        found = [0] * self.ranks.size
        for index in self.chosen:
            found[self.ranks.owner(index)] += self.sizes[index]
        return max(found)

    def subset(self, chosen: Sequence[int]) -> Objective:
        """The same loss over other pieces, normalized by their number of samples."""
        return replace(self, chosen=tuple(chosen))

    def loss(self, weight: Tensor) -> float:
        def summed() -> list[Tensor]:
            losses = []
            for piece in self._own_pieces():
                errors = list(piece.forward(weight))
                torch._foreach_sub_(errors, list(piece.targets))  # one launch: many would take longer than their work
                losses.append(self._loss(piece, errors))
            return [_sum(losses, weight)]

        with torch.no_grad():
            (loss,) = self.ranks.sums(summed, lambda: [_sum([], weight)])
        return float(loss)

    def of_squared_error(self, squares: float, elements: int) -> float:
        """The loss of a single operation whose squared error, over so many elements of all samples, is known."""
        return squares if self.normalization == "sum" else self.weights[0] * squares / elements

    def loss_and_gradient(self, weight: Tensor) -> tuple[float, Tensor]:
        def summed() -> list[Tensor]:
            losses, gradient = [], torch.zeros_like(weight)
            for piece in self._own_pieces():
                outputs, jacobian = piece.linearize(weight, self.precision or weight.dtype)
                errors = list(torch._foreach_sub(list(outputs), list(piece.targets)))
                del outputs
                losses.append(self._loss(piece, errors))
                gradient += jacobian.pull(errors, [2 * factor for factor in self._factors(piece, errors)])
            return [_sum(losses, weight), gradient]

        loss, gradient = self.ranks.sums(summed, lambda: [_sum([], weight), torch.zeros_like(weight)])
        return float(loss), gradient

    def product(self, kind: CurvatureKind, weight: Tensor, keep: bool) -> Product:
        """v -> B v at `weight`. `keep`: linearize every piece once and keep it, instead of once for each product."""
        of_piece = {"gauss-newton": self._gauss_newton, "hessian": self._hessian, "fisher": self._fisher}[kind]
        made = lambda: [of_piece(piece, weight) for piece in self._own_pieces()]  # noqa: E731
        kept = self.ranks.together(made) if keep else None

        def summed(v: Tensor) -> list[Tensor]:
            result = torch.zeros_like(weight)
            for product in kept if kept is not None else (of_piece(piece, weight) for piece in self._own_pieces()):
                result += product(v)
            return [result]

        return lambda v: self.ranks.sums(lambda: summed(v), lambda: [torch.zeros_like(weight)])[0]

    def _own_pieces(self) -> Iterator[Piece]:
        return (self.pieces[index] for index in self.chosen if self.ranks.owns(index) and self.sizes[index])

    def _factors(self, piece: Piece, outputs: Sequence[Tensor]) -> list[float]:
        """The factors c_k. Only the sizes of the outputs matter."""
        if self.normalization == "sum":
            return [1.0] * len(outputs)
        elements = (output.numel() / piece.samples for output in outputs)
        return [weight / (self.samples * e) for weight, e in zip(self.weights, elements, strict=True)]

    def _loss(self, piece: Piece, errors: list[Tensor]) -> Tensor:
        factors = self._factors(piece, errors)
        if errors[0].device.type == "cpu":
            return torch.stack([f * square_sum(error) for f, error in zip(factors, errors, strict=True)]).sum()
        # Factors are passed as numbers: the host would wait while a tensor of them is sent to the device.
        roots = [math.sqrt(factor) for factor in factors]
        return torch.stack(torch._foreach_mul(torch._foreach_norm(errors), roots)).square().sum()

    def _differentiable_loss(self, piece: Piece, weight: Tensor) -> Tensor:
        targets = piece.targets
        parts = zip(piece.forward(weight), targets, self._factors(piece, targets), strict=True)
        losses = [F.mse_loss(output, target, reduction="sum") * factor for output, target, factor in parts]
        return torch.stack(losses).sum()

    def _gauss_newton(self, piece: Piece, weight: Tensor) -> Product:
        outputs, jacobian = piece.linearize(weight, self.precision or weight.dtype)
        factors = [2 * factor for factor in self._factors(piece, outputs)]
        return lambda v: jacobian.pull(jacobian.push(v), factors)

    def _hessian(self, piece: Piece, weight: Tensor) -> Product:
        variable = weight.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self._differentiable_loss(piece, variable), variable, create_graph=True)
        return lambda v: torch.autograd.grad(gradient, variable, v, retain_graph=True, materialize_grads=True)[0]

    def _fisher(self, piece: Piece, weight: Tensor) -> Product:
        """(1/n) sum_i g_i g_i^T, where g_i is the gradient of sample i's loss: Gauss-Newton of the vector of losses."""

        def sample_losses(variable: Tensor) -> tuple[Tensor]:
            total = torch.zeros(piece.samples, dtype=weight.dtype, device=weight.device)
            targets = piece.targets
            parts = zip(piece.forward(variable), targets, self._factors(piece, targets), self.layouts, strict=True)
            for output, target, factor, layout in parts:
                if layout is None:
                    raise InputError(
                        "the empirical Fisher needs the loss of each sample, but samples could not be told apart in "
                        "this network; use curvature='gauss-newton' or 'hessian'"
                    )
                if self.normalization != "sum":
                    factor *= self.samples
                total = total + factor * layout.split((output - target).square(), piece.samples).sum(1)
            return (total,)

        jacobian = linearize(sample_losses, weight)[1]
        return lambda v: jacobian.pull(jacobian.push(v), [1 / self.samples])


def _sum(losses: Sequence[Tensor], like: Tensor) -> Tensor:
    return (
        torch.stack(list(losses)).sum().double() if losses else torch.zeros((), dtype=torch.float64, device=like.device)
    )


def square_sum(error: Tensor) -> Tensor:
    """The sum of squares, in double precision over rows.

    A CPU adds squares one after another in float32, which loses a fiftieth of a sum of a hundred million.
    """
    inner = tuple(range(1, error.ndim)) or None
    norms: Tensor = torch.linalg.vector_norm(error, dim=inner, dtype=torch.promote_types(error.dtype, torch.float32))
    return norms.double().square().sum()


def restrict(product: Product, mask: Tensor) -> Product:
    """The product restricted to kept weights: v -> mask * B (mask * v)."""
    return lambda v: product(v * mask) * mask
