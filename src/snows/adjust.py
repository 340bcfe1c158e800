"""One layer, or some together: the paper's Algorithm 2, sub-sampled Newton on the K-step loss."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .curvature import CurvatureKind, Objective, restrict
from .errors import SnowsWarning, StatisticsError
from .graph import Segment
from .memory import Memory, linearized_bytes
from .problem import LayerProblem
from .recipe import Recipe
from .rows import RowBlocks, RowPreconditioner
from .solver import CGOptions, Newton, NewtonOptions, NewtonOutcome, System, newton

_SAMPLES_PER_INPUT, _LEAST_SAMPLES = 7, 100  # in products


@dataclass(frozen=True)
class Turn:
    """Which solve of a run this is. Randomness is keyed by it, never by the order of calls (so an interrupted run can
    be repeated) nor by names (so it does not matter how a network is spelled)."""

    seed: int
    sweep: int
    index: int

    def generator(self) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}/{self.sweep}/{self.index}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@dataclass(frozen=True)
class Start:
    """Where a solve began, and which curvature it used."""

    weight: Tensor
    name: str
    loss_masked: float
    relative_damping: float
    curvature: CurvatureKind


@dataclass(frozen=True)
class Solved:
    """A layer's weight after a solve. `kept` says which: the solve's own, or the start where that did better on
    held-out samples."""

    weight: Tensor
    loss: float
    newton: Newton
    start: Start
    kept: str
    held_out_masked: float
    held_out: float


def curvature_kind(recipe: Recipe, segment: Segment) -> CurvatureKind:
    """Where every operation is piecewise linear, Gauss-Newton is the Hessian; elsewhere "auto" takes the Hessian."""
    if recipe.curvature != "auto":
        return recipe.curvature
    return "gauss-newton" if segment.piecewise_linear else "hessian"


def derivative_precision(recipe: Recipe, segment: Segment, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """On a GPU half of the bytes take half of the time, and CG bears the rounding; losses, which decide what is kept,
    are in full precision always."""
    halved = recipe.precision == "auto" and device.type == "cuda" and dtype == torch.float32
    return torch.bfloat16 if halved and segment.piecewise_linear else dtype


def samples_in_products(recipe: Recipe, inputs: Sequence[int]) -> int | None:
    """So many that the curvature of an output's kept `inputs` is known about equally well in every layer, few inputs or
    many; None: all."""
    if recipe.product_samples is None:
        return None
    return min(recipe.product_samples, max(_LEAST_SAMPLES, _SAMPLES_PER_INPUT * max(inputs)))


def solve_layer(
    problem: LayerProblem,
    masked: Tensor,
    mask: Tensor,
    recipe: Recipe,
    memory: Memory,
    turn: Turn,
) -> Solved:
    """Newton-CG on the K-step loss; `masked` and `mask` are packed as the problem packs weights.

    No layer gets worse: what is kept is best on held-out samples.
    """
    precision = derivative_precision(recipe, problem.segment, masked.device, masked.dtype)
    objective = problem.objective(recipe.normalization, precision)
    newton, start = _solve(problem, objective, masked, mask, recipe, memory, turn)
    if not problem.held_out:
        return Solved(newton.weight, newton.loss, newton, start, "solved", math.nan, math.nan)
    judge = objective.subset(problem.held_out)
    candidates = [("masked weights", masked, start.loss_masked)]
    if start.weight is not masked:
        candidates.append((start.name, start.weight, newton.loss_before))
    if newton.weight is not start.weight:
        candidates.append(("solved", newton.weight, newton.loss))
    held_out = [judge.loss(weight) for _, weight, _ in candidates]
    best = min(range(len(candidates)), key=lambda i: held_out[i] if math.isfinite(held_out[i]) else math.inf)
    name, weight, loss = candidates[best]
    kept = "solved" if weight is newton.weight else name
    return Solved(weight, loss, newton, start, kept, held_out[0], held_out[best])


def _solve(
    problem: LayerProblem,
    objective: Objective,
    masked: Tensor,
    mask: Tensor,
    recipe: Recipe,
    memory: Memory,
    turn: Turn,
) -> tuple[Newton, Start]:
    """Newton-CG from the better of two starts. After the first sweep the weights so far always are."""
    segment, pack, unpack = problem.segment, problem.packing.pack, problem.packing.unpack
    kind = curvature_kind(recipe, segment)
    closed_form = recipe.start == "closed-form" and turn.sweep == 0
    blocks: list[RowBlocks] = []
    if closed_form or recipe.preconditioner == "rows":
        samples = None if closed_form else recipe.product_samples  # a preconditioner needs no more than products do
        moments = [problem.moments(index, samples) for index in range(len(segment.layers))]
        # A closed form needs double precision. A preconditioner does not, and stands for the damped system.
        exact, ridge = (
            (torch.float64, recipe.ridge) if closed_form else (masked.dtype, max(recipe.ridge, recipe.relative_damping))
        )
        parts = zip(moments, unpack(mask), strict=True)
        try:
            blocks = [
                RowBlocks(m.gram.to(exact), part.flatten(1), ridge, masked.dtype, memory.factors) for m, part in parts
            ]
        except StatisticsError as error:
            message = f"{segment.layers[0].name}: {error}; it is solved without its closed form"
            warnings.warn(message, SnowsWarning, stacklevel=2)
    weight, name = masked, "masked weights"
    loss = loss_masked = math.nan  # where nothing is to be compared, Newton's method says what it is
    if closed_form or recipe.minibatch is not None:
        loss = loss_masked = objective.loss(masked)
    slope = None
    if blocks and closed_form:
        weights = zip(blocks, unpack(masked), moments, strict=True)
        refit = pack([b.refit(w.flatten(1), m.cross).weight.view_as(w) for b, w, m in weights])
        if segment.is_one_layer or recipe.minibatch is not None:
            loss_refit = objective.loss(refit)
        else:  # most likely Newton's method begins here
            loss_refit, slope = objective.loss_and_gradient(refit)
        if loss_refit < loss:
            weight, loss, name = refit, loss_refit, "least squares"
    damping = max((b.relative_damping for b in blocks if closed_form), default=0.0)
    start = Start(weight, name, loss_masked, damping, kind)
    if segment.is_one_layer and name == "least squares":  # nothing is left for Newton to do
        return Newton(weight, loss, loss, 0, 0, NewtonOutcome.CLOSED_FORM), start

    probe = torch.randint(0, 2, mask.shape, generator=turn.generator()).to(mask.device, masked.dtype) * 2 - 1
    probe = probe * mask

    def system(curvature: Objective, at: Tensor) -> System:
        held = linearized_bytes(segment.cost, kind, curvature.precision or at.dtype)
        keep = held * curvature.samples <= memory.products
        product = restrict(curvature.product(kind, at, keep), mask)
        if recipe.preconditioner is None or not blocks:
            return System(product)
        rows = RowPreconditioner(blocks, unpack(probe), unpack(product(probe)))
        return System(product, rows.mean_diagonal, lambda residual: pack(rows(unpack(residual))))

    assert isinstance(recipe.cg_absolute_tolerance, float)  # resolved by the plan
    options = NewtonOptions(
        recipe.newton_steps,
        CGOptions(recipe.cg_steps, recipe.cg_absolute_tolerance, recipe.cg_relative_tolerance, recipe.cg_least_gain),
        recipe.damping,
        recipe.relative_damping,
        recipe.armijo,
    )
    if recipe.minibatch is None:
        samples = samples_in_products(recipe, [int(part.flatten(1).sum(1).max()) for part in unpack(mask)])
        narrow = problem if samples is None else problem.narrowed(samples)
        sampled = narrow.objective(recipe.normalization, objective.precision)
        subsets = _rotating_subsets(narrow.sizes[: len(sampled.chosen)], samples, turn.sweep * recipe.newton_steps)
        known = (loss, slope) if slope is not None and weight is not masked else None
        systems = lambda at, step: system(sampled.subset(subsets(step)), at)  # noqa: E731
        found = newton(objective, systems, weight, mask, options, known)
        return found, start if closed_form else replace(start, loss_masked=found.loss_before)

    steps = cg_steps = negative = 0
    for part in _consecutive(problem.sizes[: len(objective.chosen)], recipe.minibatch):
        batch = objective.subset(part)
        solved = newton(batch, lambda at, _, batch=batch: system(batch, at), weight, mask, options)  # type: ignore[misc]
        weight = solved.weight
        steps, cg_steps = steps + solved.steps, cg_steps + solved.cg_steps
        negative += solved.negative_curvature
    final = objective.loss(weight)
    return Newton(weight, loss, final, steps, cg_steps, NewtonOutcome.STEPS_DONE, negative), start


def _rotating_subsets(sizes: tuple[int, ...], samples: int | None, turn: int) -> Callable[[int], tuple[int, ...]]:
    """Pieces with about `samples` samples, others at each step and sweep."""
    if samples is None or samples >= sum(sizes):
        return lambda step: tuple(range(len(sizes)))
    count = max(1, round(samples / sizes[0]))
    return lambda step: tuple(sorted({((turn + step) * count + i) % len(sizes) for i in range(count)}))


def _consecutive(sizes: tuple[int, ...], samples: int) -> list[tuple[int, ...]]:
    """Pieces in groups of about `samples` samples: the mini-batches of Algorithm 2."""
    count = max(1, round(samples / sizes[0]))
    return [tuple(range(i, min(i + count, len(sizes)))) for i in range(0, len(sizes), count)]
