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
    """How a solve ended, in the words of the report."""

    CONVERGED = "residual below the tolerance"
    LITTLE_GAIN = "another step would have gained little"
    MAX_STEPS = "all CG steps used"
    NEGATIVE_CURVATURE = "left at negative curvature"
    NOT_FINITE = "left at a number that is not finite"


@dataclass(frozen=True)
class CGResult:
    """The solution, and how many steps it took."""

    solution: Tensor
    steps: int
    outcome: CGOutcome
    residuals: tuple[float, ...] = ()  # norm after each step, relative to that of the right-hand side


@dataclass(frozen=True)
class CGOptions:
    """When to stop. The residual is below the tolerance if it is below the larger of the two."""

    max_steps: int
    absolute_tolerance: float = 0.0
    relative_tolerance: float = 0.0  # relative to the norm of the right-hand side
    least_gain: float = 0.0  # stop at a step that gains less than this share of what all steps gained in the model
    refresh: int = 25  # the updated residual drifts in float32: compute it anew every so many steps


def identity(r: Tensor) -> Tensor:
    """No preconditioner."""
    return r


def conjugate_gradient(
    product: Product,
    rhs: Tensor,
    options: CGOptions,
    precondition: Product = identity,
    damping: float = 0.0,
    notify: Callable[[int], None] = lambda step: None,
) -> CGResult:
    """Solve (B + damping I) delta = rhs, where `product` is v -> B v. Names are those of Algorithm 1.

    `notify` is told of each step that begins.

    At negative curvature the solution before that step is returned. If it is the first step, the preconditioned
    right-hand side is returned, which is still a descent direction.
    """
    delta, r = torch.zeros_like(rhs), rhs.clone()
    norm = float(rhs.norm())
    tolerance = max(options.absolute_tolerance, options.relative_tolerance * norm)
    if norm <= tolerance:
        return CGResult(delta, 0, CGOutcome.CONVERGED)
    z = precondition(r)
    p = z.clone()
    rz = torch.sum(r * z)
    all_gains, size = 0.0, norm
    residuals: list[float] = []
    for step in range(1, options.max_steps + 1):
        notify(step)
        bp = product(p) + damping * p
        curvature = torch.sum(p * bp)
        eta = rz / curvature
        delta_new = delta + eta * p
        r = rhs - product(delta_new) - damping * delta_new if step % options.refresh == 0 else r - eta * bp
        # The gain is twice that of the quadratic model. The host waits for the device here and nowhere else: for all
        # three numbers at once.
        curvature_value, norm, gain = torch.stack([curvature, r.norm(), eta * rz]).tolist()
        if not math.isfinite(curvature_value):
            return CGResult(delta, step - 1, CGOutcome.NOT_FINITE, tuple(residuals))
        if curvature_value <= 0:
            return CGResult(delta if step > 1 else z, step, CGOutcome.NEGATIVE_CURVATURE, tuple(residuals))
        delta = delta_new
        residuals.append(norm / size)
        if norm <= tolerance:
            return CGResult(delta, step, CGOutcome.CONVERGED, tuple(residuals))
        all_gains += gain
        if gain < options.least_gain * all_gains:
            return CGResult(delta, step, CGOutcome.LITTLE_GAIN, tuple(residuals))
        z = precondition(r)
        rz_new = torch.sum(r * z)
        gamma = rz_new / rz
        p = z + gamma * p
        rz = rz_new
    return CGResult(delta, options.max_steps, CGOutcome.MAX_STEPS, tuple(residuals))
