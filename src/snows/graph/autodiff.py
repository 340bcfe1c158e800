"""Derivatives as linear maps: tangents forth (J v), cotangents back (J^T u)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

Forward = Callable[[Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class LinearMap:
    """The Jacobian of some outputs with respect to one variable."""

    push: Callable[[Tensor], Sequence[Tensor]]  # v -> J v, one tangent for each output
    pull: Callable[[Sequence[Tensor], Sequence[float]], Tensor]  # u, c -> J^T (c u), one factor for each output


def linearize(forward: Forward, at: Tensor) -> tuple[tuple[Tensor, ...], LinearMap]:
    """The outputs, and the Jacobian by autograd. The forward pass runs once, here."""
    outputs, push, pull = differentiate(lambda *x: forward(x[0]), (at,))

    def weighted(u: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
        return pull([factor * part for factor, part in zip(factors, u, strict=True)])[0]

    return outputs, LinearMap(lambda v: push([v]), weighted)


def differentiate(
    function: Callable[..., tuple[Tensor, ...]], at: Sequence[Tensor]
) -> tuple[
    tuple[Tensor, ...],
    Callable[[Sequence[Tensor]], Sequence[Tensor]],
    Callable[[Sequence[Tensor]], Sequence[Tensor]],
]:
    """A function's outputs at some tensors, its tangents and its cotangents there. Some outputs may not vary at all.

    J v is the derivative of u -> J^T u, which is linear in u: all in reverse mode, with nothing recomputed.
    """
    variables = tuple(x.detach().requires_grad_() for x in at)
    with torch.enable_grad():
        outputs = function(*variables)
    varies = [output.requires_grad for output in outputs]
    moving = [output for output, moves in zip(outputs, varies, strict=True) if moves]
    # Only what derivatives need stays in memory: probes without storage, and edges of the graph instead of its outputs.
    zeros = [output.new_zeros(()).expand_as(output) for output in outputs]
    probes = tuple(output.new_zeros(()).expand_as(output).requires_grad_() for output in moving)
    edges = tuple(get_gradient_edge(output) for output in moving)
    pulled: list[tuple[Tensor, ...]] = []  # made when it is asked for: a gradient does not need it

    def push(v: Sequence[Tensor]) -> list[Tensor]:
        if edges and not pulled:
            with torch.enable_grad():
                pulled.append(torch.autograd.grad(edges, variables, probes, create_graph=True, materialize_grads=True))
        pushed = iter(
            torch.autograd.grad(pulled[0], probes, tuple(v), retain_graph=True, materialize_grads=True) if edges else ()
        )
        return [next(pushed) if moves else zero for moves, zero in zip(varies, zeros, strict=True)]

    def pull(u: Sequence[Tensor]) -> Sequence[Tensor]:
        given = tuple(part for part, moves in zip(u, varies, strict=True) if moves)
        if not edges:
            return [torch.zeros_like(variable) for variable in variables]
        return torch.autograd.grad(edges, variables, given, retain_graph=True, materialize_grads=True)

    return tuple(output.detach() for output in outputs), push, pull
