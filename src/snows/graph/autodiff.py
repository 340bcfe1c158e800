"""Derivatives as linear maps: J v takes tangents forward, Jᵀ u takes cotangents back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

Forward = Callable[[Tensor], tuple[Tensor, ...]]
TensorsToTensors = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class LinearMap:
    """The Jacobian of some outputs with respect to one variable."""

    push: Callable[[Tensor], Sequence[Tensor]]  # v -> J v, one tangent for each output
    pull: Callable[[Sequence[Tensor], Sequence[float]], Tensor]  # u, c -> Jᵀ (c u), one factor for each output


def linearize(forward: Forward, at: Tensor) -> tuple[tuple[Tensor, ...], LinearMap]:
    """The outputs, and their Jacobian by autograd. The forward pass runs once, here."""
    outputs, push, pull = differentiate(lambda *x: forward(x[0]), (at,))

    def weighted(u: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
        return pull([factor * part for factor, part in zip(factors, u, strict=True)])[0]

    return outputs, LinearMap(lambda v: push([v]), weighted)


def differentiate(
    function: Callable[..., tuple[Tensor, ...]], at: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], TensorsToTensors, TensorsToTensors]:
    """A function's outputs at some point, and its derivatives there: v -> J v and u -> Jᵀ u.

    J v is the derivative of u -> Jᵀ u, which is linear in u: both are in reverse mode, and nothing is computed again.
    Outputs that do not depend on the point have zero derivatives.
    """
    variables = tuple(x.detach().requires_grad_() for x in at)
    with torch.enable_grad():
        outputs = function(*variables)
    varies = [output.requires_grad for output in outputs]
    moving = [output for output, moves in zip(outputs, varies, strict=True) if moves]
    # Only what derivatives need stays in memory: probes have no storage, and edges of the graph stand for its outputs.
    zeros = [output.new_zeros(()).expand_as(output) for output in outputs]
    probes = tuple(output.new_zeros(()).expand_as(output).requires_grad_() for output in moving)
    edges = tuple(get_gradient_edge(output) for output in moving)
    pulled: list[tuple[Tensor, ...]] = []  # made at the first push: a gradient alone does not need it

    def push(v: Sequence[Tensor]) -> list[Tensor]:
        if edges and not pulled:
            with torch.enable_grad():
                pulled.append(torch.autograd.grad(edges, variables, probes, create_graph=True, materialize_grads=True))
        pushed = iter(
            torch.autograd.grad(pulled[0], probes, tuple(v), retain_graph=True, materialize_grads=True) if edges else ()
        )
        return [next(pushed) if moves else zero for moves, zero in zip(varies, zeros, strict=True)]

    def pull(u: Sequence[Tensor]) -> Sequence[Tensor]:
        if not edges:
            return [torch.zeros_like(variable) for variable in variables]
        wanted = tuple(part for part, moves in zip(u, varies, strict=True) if moves)
        return torch.autograd.grad(edges, variables, wanted, retain_graph=True, materialize_grads=True)

    return tuple(output.detach() for output in outputs), push, pull
