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
    Callable[[Sequence[Tensor]], tuple[Tensor, ...]],
    Callable[[Sequence[Tensor]], tuple[Tensor, ...]],
]:
    """A function's outputs at some tensors, its tangents and its cotangents there.

    J v is the derivative of u -> J^T u, which is linear in u: all in reverse mode, with nothing recomputed.
    """
    variables = tuple(x.detach().requires_grad_() for x in at)
    with torch.enable_grad():
        outputs = function(*variables)
    # Only what derivatives need stays in memory: probes without storage, and edges of the graph instead of its outputs.
    probes = tuple(output.new_zeros(()).expand_as(output).requires_grad_() for output in outputs)
    edges = tuple(get_gradient_edge(output) for output in outputs)
    pulled: list[tuple[Tensor, ...]] = []  # made when it is asked for: a gradient does not need it

    def push(v: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if not pulled:
            with torch.enable_grad():
                pulled.append(torch.autograd.grad(edges, variables, probes, create_graph=True, materialize_grads=True))
        return torch.autograd.grad(pulled[0], probes, tuple(v), retain_graph=True, materialize_grads=True)

    def pull(u: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(edges, variables, tuple(u), retain_graph=True, materialize_grads=True)

    return tuple(output.detach() for output in outputs), push, pull
