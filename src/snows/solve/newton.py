"""Newton's method with conjugate gradients: the steps of the paper's Algorithm 2.

It sees a loss, its gradient and curvature products; nothing here knows networks or layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from ..events import CGStep, Listener, ignore
from .cg import CGOptions, CGOutcome, Product, conjugate_gradient, identity


class NewtonOutcome(Enum):
    """How a solve ended, in the words of the report."""

    STEPS_DONE = "all Newton steps taken"
    CONVERGED = "gradient below the tolerance"
    NO_DECREASE = "no step along the direction lowered the loss"
    NOT_FINITE = "the loss or its gradient was not finite; the start was kept"
    CLOSED_FORM = "solved in closed form"
    MASK_ONLY = "mask only"


class Objective(Protocol):
    """The loss that is minimized."""

    def loss(self, weight: Tensor) -> float: ...
    def loss_and_gradient(self, weight: Tensor) -> tuple[float, Tensor]: ...


@dataclass(frozen=True)
class NewtonOptions:
    """How many steps, how each one is solved and damped, and when it is accepted."""

    steps: int
    cg: CGOptions
    damping: float = 0.0  # Levenberg-Marquardt, absolute
    relative_damping: float = 0.0  # the same, as a share of the mean diagonal of B
    armijo: float = 1e-5  # beta of the paper's appendix
    halvings: int = 10


@dataclass(frozen=True)
class NewtonResult:
    """The weights after the last accepted step, and how they came about."""

    weight: Tensor
    loss_before: float
    loss: float
    steps: int
    cg_steps: int
    outcome: NewtonOutcome
    negative_curvature: int = 0  # how many CG solves met it
    gradient_norm: float = math.nan
    losses: tuple[float, ...] = ()  # at the start, and after each accepted step
    cg_residuals: tuple[tuple[float, ...], ...] = ()  # of each CG solve, see CGResult


@dataclass(frozen=True)
class System:
    """The linear system of one Newton step: products with B, the mean of its diagonal, and a preconditioner."""

    product: Product
    mean_diagonal: float = 0.0
    precondition: Product = identity


def newton(
    objective: Objective,
    system_at: Callable[[Tensor, int], System],
    weight: Tensor,
    mask: Tensor,
    options: NewtonOptions,
    at_start: tuple[float, Tensor] | None = None,
    notify: Listener = ignore,
) -> NewtonResult:
    """Newton's method on the kept weights. Each step solves for a direction (Algorithm 1), then searches along it.

    The loss never rises: a step that fails Armijo's condition is not taken.

    Args:
        objective: The loss and its gradient.
        system_at: The system at a weight for a step (counted from 0). Its curvature may be that of a sub-sample.
        weight: Where to start. It is zero wherever the mask is.
        mask: True where a weight is kept.
        options: Steps, damping and line search.
        at_start: The loss and the gradient at the start, if they are known.
        notify: Gets every step of conjugate gradients.
    """
    loss, gradient = at_start or objective.loss_and_gradient(weight)
    result = NewtonResult(weight, loss, loss, 0, 0, NewtonOutcome.STEPS_DONE, losses=(loss,))
    for step in range(options.steps):
        if step:
            loss, gradient = objective.loss_and_gradient(weight)
        gradient = gradient * mask
        norm = float(gradient.norm())
        result = replace(result, gradient_norm=norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return replace(result, outcome=NewtonOutcome.NOT_FINITE)
        if norm <= options.cg.absolute_tolerance:
            return replace(result, outcome=NewtonOutcome.CONVERGED)
        system = system_at(weight, step)
        damping = options.damping + options.relative_damping * system.mean_diagonal

        def count(cg_step: int, newton_step: int = step + 1) -> None:
            notify(CGStep(newton_step, options.steps, cg_step, options.cg.max_steps))

        cg = conjugate_gradient(system.product, -gradient, options.cg, system.precondition, damping, count)
        result = replace(
            result,
            cg_steps=result.cg_steps + cg.steps,
            negative_curvature=result.negative_curvature + (cg.outcome is CGOutcome.NEGATIVE_CURVATURE),
            cg_residuals=(*result.cg_residuals, cg.residuals),
        )
        accepted = line_search(objective, weight, loss, gradient, cg.solution, options)
        if accepted is None:
            return replace(result, outcome=NewtonOutcome.NO_DECREASE)
        weight, loss = accepted
        result = replace(result, weight=weight, loss=loss, steps=step + 1, losses=(*result.losses, loss))
    return result


def line_search(
    objective: Objective, weight: Tensor, loss: float, gradient: Tensor, direction: Tensor, options: NewtonOptions
) -> tuple[Tensor, float] | None:
    """The first of 1, 1/2, 1/4 … times the direction that meets Armijo's condition, or None.

    Returns the new weights and their loss.
    """
    slope = float(torch.sum(direction * gradient))
    if not math.isfinite(slope) or slope >= 0:
        return None
    alpha = 1.0
    for _ in range(options.halvings + 1):
        candidate = weight + alpha * direction
        candidate_loss = objective.loss(candidate)
        if candidate_loss <= loss + alpha * options.armijo * slope and candidate_loss < loss:
            return candidate, candidate_loss
        alpha /= 2
    return None
