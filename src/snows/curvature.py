"""The K-step loss, its gradient and its curvature products. Pure functions of one weight; knows no layer types.

The normalization, stated once. F_k(w) is the output of operation k, Y_k its target, for n samples of e_k elements each:

    loss(w) = sum_k c_k * ||Y_k - F_k(w)||^2,    c_k = 1                        "sum": Equation (3) as it is printed
                                                 c_k = 1 / (n e_k)              "mean"
                                                 c_k = 1 / (n e_k var(Y_k))     "variance": each operation counts alike

Products are sums over pieces (micro-batches), so memory is bounded by the piece, not by the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from .errors import InputError

Product = Callable[[Tensor], Tensor]
Forward = Callable[[Tensor], tuple[Tensor, ...]]
Normalization = Literal["variance", "mean", "sum"]
CurvatureKind = Literal["gauss-newton", "hessian", "fisher"]


@dataclass(frozen=True)
class Piece:
    """One micro-batch: the outputs as a function of the weight, and what they should be."""

    forward: Forward
    targets: tuple[Tensor, ...]
    samples: int


class Pieces(Protocol):
    """Micro-batches, made when asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Piece: ...


class SampleSplit(Protocol):
    """How to see a tensor as one row per sample."""

    def split(self, value: Tensor, samples: int) -> Tensor: ...


@dataclass(frozen=True)
class Objective:
    """The K-step loss over some pieces.

    `weights` are the factors 1, 1 or 1 / var(Y_k) of the normalization; `chosen` are the pieces it is taken over.
    """

    pieces: Pieces
    weights: tuple[float, ...]
    normalization: Normalization
    chosen: tuple[int, ...]
    sizes: tuple[int, ...]  # samples in each piece
    layouts: Sequence[SampleSplit | None] = ()

    @property
    def samples(self) -> int:
        return sum(self.sizes[index] for index in self.chosen)

    def subset(self, chosen: Sequence[int]) -> Objective:
        """The same loss over other pieces, normalized by their own number of samples."""
        return Objective(self.pieces, self.weights, self.normalization, tuple(chosen), self.sizes, self.layouts)

    def loss(self, weight: Tensor) -> float:
        with torch.no_grad():
            return float(sum(self._piece_loss(piece, weight) for piece in self._chosen_pieces()))

    def loss_and_gradient(self, weight: Tensor) -> tuple[float, Tensor]:
        total, gradient = torch.zeros((), dtype=weight.dtype, device=weight.device), torch.zeros_like(weight)
        for piece in self._chosen_pieces():
            variable = weight.detach().requires_grad_()
            loss = self._piece_loss(piece, variable)
            gradient += torch.autograd.grad(loss, variable)[0]
            total += loss.detach()
        return float(total), gradient

    def product(self, kind: CurvatureKind, weight: Tensor, keep: bool) -> Product:
        """v -> B v at `weight`. With `keep`, pieces are linearized once and stay in memory; else for each product."""
        make = {"gauss-newton": self._gauss_newton, "hessian": self._hessian, "fisher": self._fisher}[kind]
        kept = [make(piece, weight) for piece in self._chosen_pieces()] if keep else None

        def total(v: Tensor) -> Tensor:
            result = torch.zeros_like(weight)
            for product in kept if kept is not None else (make(piece, weight) for piece in self._chosen_pieces()):
                result += product(v)
            return result

        return total

    def _chosen_pieces(self) -> Iterator[Piece]:
        return (self.pieces[index] for index in self.chosen)

    def _factor(self, k: int, target: Tensor, samples: int) -> float:
        """c_k of the normalization."""
        if self.normalization == "sum":
            return 1.0
        return self.weights[k] / (self.samples * (target.numel() / samples))

    def _piece_loss(self, piece: Piece, weight: Tensor) -> Tensor:
        losses = [
            F.mse_loss(output, target, reduction="sum") * self._factor(k, target, piece.samples)
            for k, (output, target) in enumerate(zip(piece.forward(weight), piece.targets, strict=True))
        ]
        return torch.stack(losses).sum()

    def _gauss_newton(self, piece: Piece, weight: Tensor) -> Product:
        push, pull = linearize(piece.forward, weight)
        factors = [2 * self._factor(k, target, piece.samples) for k, target in enumerate(piece.targets)]
        return lambda v: pull(tuple(c * t for c, t in zip(factors, push(v), strict=True)))

    def _hessian(self, piece: Piece, weight: Tensor) -> Product:
        variable = weight.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self._piece_loss(piece, variable), variable, create_graph=True)
        return lambda v: torch.autograd.grad(gradient, variable, v, retain_graph=True, materialize_grads=True)[0]

    def _fisher(self, piece: Piece, weight: Tensor) -> Product:
        """(1/n) sum_i g_i g_i^T with g_i the gradient of sample i's own loss: Gauss-Newton of the samples' losses."""

        def sample_losses(variable: Tensor) -> tuple[Tensor]:
            total = torch.zeros(piece.samples, dtype=weight.dtype, device=weight.device)
            for k, (output, target) in enumerate(zip(piece.forward(variable), piece.targets, strict=True)):
                layout = self.layouts[k]
                if layout is None:
                    raise InputError(
                        "the empirical Fisher needs each sample's own loss, but this network mixes samples in a way "
                        "that was not recognized; use curvature='gauss-newton' or 'hessian'"
                    )
                factor = self._factor(k, target, piece.samples)
                if self.normalization != "sum":
                    factor *= self.samples
                total = total + factor * layout.split((output - target).square(), piece.samples).sum(1)
            return (total,)

        push, pull = linearize(sample_losses, weight)
        return lambda v: pull(push(v)) / self.samples


def linearize(
    forward: Forward, weight: Tensor
) -> tuple[Callable[[Tensor], tuple[Tensor, ...]], Callable[[tuple[Tensor, ...]], Tensor]]:
    """The Jacobian at `weight` as two linear maps: v -> J v, and u -> J^T u. The forward pass runs once, here.

    J v is the derivative of u -> J^T u, which is linear in u: all in reverse mode, with nothing recomputed.
    """
    variable = weight.detach().requires_grad_()
    outputs = forward(variable)
    # Only what derivatives need stays in memory: probes without storage, and edges of the graph instead of its outputs.
    probes = tuple(output.new_zeros(()).expand_as(output).requires_grad_() for output in outputs)
    (pulled,) = torch.autograd.grad(outputs, variable, probes, create_graph=True)
    edges = tuple(get_gradient_edge(output) for output in outputs)
    del outputs

    def push(v: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(pulled, probes, v, retain_graph=True, materialize_grads=True)

    def pull(u: tuple[Tensor, ...]) -> Tensor:
        return torch.autograd.grad(edges, variable, u, retain_graph=True)[0]

    return push, pull


def restrict(product: Product, mask: Tensor) -> Product:
    """The product on kept weights alone."""
    return lambda v: product(v * mask) * mask
