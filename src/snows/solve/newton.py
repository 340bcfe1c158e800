"""Newton's method with conjugate gradients. Knows a loss, its gradient and products; no networks, no masks.

How a solve ended is a value: the enumerations' texts are what the user reads in the report.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from .cg import CGOptions, CGOutcome, Product, conjugate_gradient, identity


class NewtonOutcome(Enum):
    STEPS_DONE = "all Newton steps taken"
    CONVERGED = "gradient below the tolerance"
    NO_DECREASE = "no step along the direction lowered the loss"
    NOT_FINITE = "the loss or its gradient was not finite; the start was kept"
    CLOSED_FORM = "solved in closed form"
    NOT_ASKED = "mask only"


class Objective(Protocol):
    """What Newton's method needs to know of a loss."""

    def loss(self, weight: Tensor) -> float: ...
    def loss_and_gradient(self, weight: Tensor) -> tuple[float, Tensor]: ...


@dataclass(frozen=True)
class NewtonOptions:
    steps: int
    cg: CGOptions
    damping: float = 0.0  # Levenberg-Marquardt, absolute
    relative_damping: float = 0.0  # the same, as a share of the mean diagonal of B
    armijo: float = 1e-5  # beta of the paper's appendix
    halvings: int = 10


@dataclass(frozen=True)
class Newton:
    weight: Tensor
    loss_before: float
    loss: float
    steps: int
    cg_steps: int
    outcome: NewtonOutcome
    negative_curvature: int = 0  # how often CG met it
    gradient_norm: float = math.nan


@dataclass(frozen=True)
class System:
    """One Newton system: products with B at a weight, its mean diagonal, and a preconditioner."""

    product: Product
    mean_diagonal: float = 0.0
    precondition: Product = identity


def newton(
    objective: Objective,
    system_at: Callable[[Tensor, int], System],
    weight: Tensor,
    mask: Tensor,
    options: NewtonOptions,
    known: tuple[float, Tensor] | None = None,
) -> Newton:
    """Newton-CG on the kept weights. The loss never rises: a step that does not pass Armijo's test is not taken.

    `system_at(weight, step)` gives the curvature, which may be that of a sub-sample. `known`: the loss and its gradient
    at the start, where they are.
    """
    loss, gradient = known or objective.loss_and_gradient(weight)
    result = Newton(weight, loss, loss, 0, 0, NewtonOutcome.STEPS_DONE)
    for step in range(options.steps):
        if step:
            loss, gradient = objective.loss_and_gradient(weight)
        gradient = gradient * mask
        norm = float(gradient.norm())
        result = replace(result, gradient_norm=norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return replace(result, outcome=NewtonOutcome.NOT_FINITE)
        if norm == 0 or norm <= options.cg.absolute_tolerance:
            return replace(result, outcome=NewtonOutcome.CONVERGED)
        system = system_at(weight, step)
        damping = options.damping + options.relative_damping * system.mean_diagonal
        cg = conjugate_gradient(system.product, -gradient, options.cg, system.precondition, damping)
        result = replace(
            result,
            cg_steps=result.cg_steps + cg.steps,
            negative_curvature=result.negative_curvature + (cg.outcome is CGOutcome.NEGATIVE_CURVATURE),
        )
        accepted = line_search(objective, weight, loss, gradient, cg.solution, options)
        if accepted is None:
            return replace(result, outcome=NewtonOutcome.NO_DECREASE)
        weight, loss = accepted
        result = replace(result, weight=weight, loss=loss, steps=step + 1)
    return result


def line_search(
    objective: Objective, weight: Tensor, loss: float, gradient: Tensor, direction: Tensor, options: NewtonOptions
) -> tuple[Tensor, float] | None:
    """Armijo's condition by halving from a full step. None if no step passes."""
    slope = float(torch.sum(direction * gradient))
    if not math.isfinite(slope) or slope >= 0:
        return None
    alpha = 1.0
    for _ in range(options.halvings + 1):
        candidate = weight + alpha * direction
        value = objective.loss(candidate)
        if value <= loss + alpha * options.armijo * slope and value < loss:
            return candidate, value
        alpha /= 2
    return None
