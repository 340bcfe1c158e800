"""The main loop: the paper's Algorithm 3, with Algorithm 2 for each layer."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .curvature import CurvatureKind, Objective, restrict
from .graph import Graph
from .graph.segment import Values
from .masks import Choice, LayerMethod
from .memory import Memory, linearized_bytes
from .plan import Plan, PlannedLayer
from .problem import LayerProblem
from .recipe import Recipe
from .report import SolveReport
from .rows import RowBlocks, RowPreconditioner
from .solver import CGOptions, Newton, NewtonOptions, NewtonOutcome, System, newton
from .streams import Stream


@dataclass(frozen=True)
class Event:
    """One layer of one sweep has begun (`solve` is None) or ended."""

    layer: str
    index: int
    total: int
    sweep: int
    sweeps: int
    solve: SolveReport | None = None


def cascade(
    graph: Graph,
    plan: Plan,
    batches: list[Values],
    sizes: tuple[int, ...],
    choice: Choice,
    method: LayerMethod | None,
    recipe: Recipe,
    memory: Memory,
    seed: int,
    tell: Callable[[Event], None],
    adjust: bool = True,
) -> dict[str, Tensor]:
    """Re-adjust every planned layer; returns the new weights by parameter name. Without `adjust`: masks alone.

    Two streams of the same samples run through one graph: the dense one gives targets, the pruned one gives inputs.
    Each layer is solved with all layers before it already pruned and, in the first sweep, all behind it still dense.
    `choice` is what a network method chose; a layer `method` fills it in on the way.
    """
    dense = graph.parameters
    current = dict(dense)
    for sweep in range(recipe.sweeps):
        dense_stream = Stream(graph, dense, batches, sizes)
        pruned_stream = Stream(graph, current, batches, sizes)
        for index, planned in enumerate(plan.pruned):
            layer = planned.layer
            where = (layer.name, index, len(plan.pruned), sweep, recipe.sweeps)
            tell(Event(*where))
            began = time.perf_counter()
            dense_stream.advance(layer.position)
            pruned_stream.advance(layer.position)
            segment = graph.segment(layer, planned.horizon)
            problem = LayerProblem(segment, dense_stream, pruned_stream, recipe.targets, memory.targets)
            if sweep == 0:
                if method is not None:
                    _choose_mask(method, planned, problem, dense[layer.parameter], choice)
                weight = choice.weights.get(layer.parameter, dense[layer.parameter])
            else:
                weight = current[layer.parameter]
            mask = choice.masks[layer.parameter]
            if not adjust:
                current[layer.parameter] = weight * mask
                tell(Event(*where, solve=_mask_only(sweep, time.perf_counter() - began)))
                continue
            generator = _generator(seed, sweep, layer.name)
            solved, start = solve_layer(problem, weight * mask, mask, recipe, memory, generator, sweep)
            current[layer.parameter] = solved.weight
            del problem  # with its activations, before the streams move on
            tell(Event(*where, solve=_solve_report(solved, start, sweep, time.perf_counter() - began)))
    return {planned.layer.parameter: current[planned.layer.parameter] for planned in plan.pruned}


@dataclass(frozen=True)
class Start:
    name: str
    loss_masked: float
    relative_damping: float
    curvature: CurvatureKind


def solve_layer(
    problem: LayerProblem,
    masked: Tensor,
    mask: Tensor,
    recipe: Recipe,
    memory: Memory,
    generator: torch.Generator,
    turn: int,
) -> tuple[Newton, Start]:
    """Algorithm 2: Newton-CG on the K-step loss of one layer, from the better of two starts."""
    segment = problem.segment
    kind: CurvatureKind
    if recipe.curvature == "auto":
        kind = "gauss-newton" if segment.piecewise_linear else "hessian"
    else:
        kind = recipe.curvature
    objective = problem.objective(recipe.normalization)
    blocks = None
    if recipe.start == "closed-form" or recipe.preconditioner == "rows":
        moments = problem.moments()
        blocks = RowBlocks(moments.gram, mask.flatten(1), recipe.ridge, masked.dtype)
    loss_masked = objective.loss(masked)
    weight, loss, name = masked, loss_masked, "masked weights"
    if blocks is not None and recipe.start == "closed-form":
        refit = blocks.refit(masked.flatten(1), moments.cross).weight.view_as(masked)
        loss_refit = objective.loss(refit)
        if loss_refit < loss:
            weight, loss, name = refit, loss_refit, "least squares"
    start = Start(name, loss_masked, blocks.relative_damping if blocks else 0.0, kind)
    own_output_only = segment.horizon == 0 and segment.outputs == segment.own.gives
    if own_output_only and name == "least squares":  # nothing is left for Newton to do
        return Newton(weight, loss, loss, 0, 0, NewtonOutcome.CLOSED_FORM), start

    probe = torch.randint(0, 2, mask.shape, generator=generator).to(mask.device, masked.dtype) * 2 - 1
    keep = linearized_bytes(segment.cost.bytes, kind) * objective.samples <= memory.products

    def system(curvature: Objective, at: Tensor) -> System:
        product = restrict(curvature.product(kind, at, keep), mask)
        if recipe.preconditioner is None or blocks is None:
            return System(product)
        rows = RowPreconditioner(blocks, probe * mask, product(probe * mask))
        return System(product, rows.mean_diagonal, rows)

    options = NewtonOptions(
        recipe.newton_steps,
        CGOptions(recipe.cg_steps, recipe.cg_absolute_tolerance, recipe.cg_relative_tolerance),
        recipe.damping,
        recipe.relative_damping,
        recipe.armijo,
    )
    if recipe.minibatch is None:
        subsets = _rotating_subsets(problem.sizes, recipe.product_samples, turn * recipe.newton_steps)
        return newton(
            objective, lambda at, step: system(objective.subset(subsets(step)), at), weight, mask, options
        ), start

    steps = cg_steps = negative = 0
    for part in _consecutive(problem.sizes, recipe.minibatch):
        batch = objective.subset(part)
        solved = newton(batch, lambda at, _, batch=batch: system(batch, at), weight, mask, options)  # type: ignore[misc]
        weight = solved.weight
        steps, cg_steps = steps + solved.steps, cg_steps + solved.cg_steps
        negative += solved.negative_curvature
    final = objective.loss(weight)
    return Newton(weight, loss, final, steps, cg_steps, NewtonOutcome.STEPS_DONE, negative), start


def _choose_mask(
    method: LayerMethod, planned: PlannedLayer, problem: LayerProblem, weight: Tensor, choice: Choice
) -> None:
    assert planned.pattern is not None
    chosen = method.choose_layer(planned.layer.parameter, weight, problem.moments().gram, planned.pattern)
    choice.masks.update(chosen.masks)
    choice.weights.update(chosen.weights)


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


def _generator(seed: int, sweep: int, layer: str) -> torch.Generator:
    """Randomness keyed by what it is for, never by the order of calls: an interrupted run can be repeated."""
    digest = hashlib.sha256(f"{seed}/{sweep}/{layer}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _mask_only(sweep: int, seconds: float) -> SolveReport:
    nan = float("nan")
    return SolveReport(sweep, nan, nan, nan, "masked weights", NewtonOutcome.NOT_ASKED.value, 0, 0, 0, "", 0.0, seconds)


def _solve_report(solved: Newton, start: Start, sweep: int, seconds: float) -> SolveReport:
    return SolveReport(
        sweep=sweep,
        loss_masked=start.loss_masked,
        loss_start=solved.loss_before,
        loss=solved.loss,
        start=start.name,
        outcome=solved.outcome.value,
        newton_steps=solved.steps,
        cg_steps=solved.cg_steps,
        negative_curvature=solved.negative_curvature,
        curvature=start.curvature,
        relative_damping=start.relative_damping,
        seconds=seconds,
    )
