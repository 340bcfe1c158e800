"""Conjugate gradients: Algorithm 1 of the paper."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]


class CGOutcome(Enum):
    CONVERGED = "residual below the tolerance"
    LITTLE_GAIN = "another step would have gained little"
    MAX_STEPS = "all CG steps used"
    NEGATIVE_CURVATURE = "left at negative curvature"
    NOT_FINITE = "left at a number that is not finite"


@dataclass(frozen=True)
class CG:
    solution: Tensor
    steps: int
    outcome: CGOutcome


@dataclass(frozen=True)
class CGOptions:
    max_steps: int
    absolute_tolerance: float = 0.0
    relative_tolerance: float = 0.0
    least_gain: float = 0.0  # share of what all steps gained, in the quadratic model, that the last one must have
    refresh: int = 25  # the recursive residual drifts in float32: recompute it this often


def identity(r: Tensor) -> Tensor:
    return r


def conjugate_gradient(
    product: Product, rhs: Tensor, options: CGOptions, precondition: Product = identity, damping: float = 0.0
) -> CG:
    """Algorithm 1: solve (B + damping I) x = rhs.

    At negative curvature the solution so far is returned; at the very first step, the preconditioned right-hand side
    (a descent direction still).
    """
    x = torch.zeros_like(rhs)
    norm = float(rhs.norm())
    tolerance = max(options.absolute_tolerance, options.relative_tolerance * norm)
    if norm <= tolerance:
        return CG(x, 0, CGOutcome.CONVERGED)
    r = rhs.clone()
    z = precondition(r)
    p = z.clone()
    rz = torch.sum(r * z)
    gained = 0.0
    for step in range(1, options.max_steps + 1):
        bp = product(p) + damping * p
        curvature = torch.sum(p * bp)
        eta = rz / curvature
        further = x + eta * p
        r = rhs - product(further) - damping * further if step % options.refresh == 0 else r - eta * bp
        # The one place where the host waits for the device.
        curvature_value, norm, gain = torch.stack([curvature, r.norm(), eta * rz / 2]).tolist()
        if not math.isfinite(curvature_value):
            return CG(x, step - 1, CGOutcome.NOT_FINITE)
        if curvature_value <= 0:
            return CG(x if step > 1 else z, step, CGOutcome.NEGATIVE_CURVATURE)
        x = further
        if norm <= tolerance:
            return CG(x, step, CGOutcome.CONVERGED)
        gained += gain
        if gain < options.least_gain * gained:
            return CG(x, step, CGOutcome.LITTLE_GAIN)
        z = precondition(r)
        rz_next = torch.sum(r * z)
        p = z + (rz_next / rz) * p
        rz = rz_next
    return CG(x, options.max_steps, CGOutcome.MAX_STEPS)
