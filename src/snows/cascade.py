"""The main loop: the paper's Algorithm 3."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .adjust import Solved, solve_layer
from .graph import Graph
from .journal import Entry, Journal
from .masks import Choice, LayerMethod
from .memory import Memory
from .plan import Plan, PlannedLayer
from .problem import LayerProblem
from .recipe import Recipe
from .report import SolveReport
from .solver import NewtonOutcome
from .streams import Batches, Stream

_REFIT_RIDGE = 1e-4  # of the weights that masks are chosen from: little, as nothing is removed yet


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
    batches: Batches,
    choice: Choice,
    method: LayerMethod | None,
    recipe: Recipe,
    memory: Memory,
    seed: int,
    tell: Callable[[Event], None],
    adjust: bool = True,
    journal: Journal | None = None,
) -> dict[str, Tensor]:
    """Re-adjust every planned layer; returns the new weights by parameter name. Without `adjust`: masks alone.

    Two streams of the same samples run through one graph: the dense one gives targets, the pruned one gives inputs.
    Each layer is solved with all layers before it already pruned and, in the first sweep, all behind it still dense.
    `choice` is what a network method chose; a layer `method` fills it in on the way. What the `journal` has is not done
    again: the streams are moved past it when the next layer needs them.
    """
    journal = journal or Journal()
    dense = graph.parameters
    current = dict(dense)
    for sweep in range(recipe.sweeps):
        dense_stream = Stream(graph, dense, batches)
        pruned_stream = Stream(graph, current, batches)
        for index, planned in enumerate(plan.pruned):
            layer = planned.layer
            where = (layer.name, index, len(plan.pruned), sweep, recipe.sweeps)
            tell(Event(*where))
            entry = journal.recall(sweep, index)
            if entry is None:
                began = time.perf_counter()
                dense_stream.advance(layer.position)
                pruned_stream.advance(layer.position)
                segment = graph.segment(layer, planned.horizon)
                problem = LayerProblem(segment, dense_stream, pruned_stream, recipe.targets, memory.targets)
                if sweep == 0 and method is not None:
                    _choose_mask(method, planned, problem, dense[layer.parameter], choice)
                start = choice.weights.get(layer.parameter, dense[layer.parameter]) if sweep == 0 else None
                mask = choice.masks[layer.parameter]
                masked = (current[layer.parameter] if start is None else start) * mask
                if adjust:
                    solved = solve_layer(problem, masked, mask, recipe, memory, seed, sweep)
                    entry = Entry(solved.weight, mask, _solve_report(solved, sweep, time.perf_counter() - began))
                else:
                    entry = Entry(masked, mask, _mask_only(sweep, time.perf_counter() - began))
                del problem  # with its activations, before the streams move on
                journal.record(sweep, index, entry)
            current[layer.parameter], choice.masks[layer.parameter] = entry.weight, entry.mask
            tell(Event(*where, solve=entry.solve))
    return {planned.layer.parameter: current[planned.layer.parameter] for planned in plan.pruned}


def _choose_mask(
    method: LayerMethod, planned: PlannedLayer, problem: LayerProblem, weight: Tensor, choice: Choice
) -> None:
    """Ask the method, with the statistics it wants (see LayerMethod)."""
    assert planned.pattern is not None
    reads = getattr(method, "reads", "pruned")
    if reads == "dense":
        gram = problem.dense_gram()
    else:
        moments = problem.moments()
        gram = moments.gram
        if reads == "refitted":
            weight = moments.refit(weight.flatten(1), _REFIT_RIDGE).view_as(weight)
    chosen = method.choose_layer(planned.layer.parameter, weight, gram, planned.pattern)
    choice.masks.update(chosen.masks)
    choice.weights.update(chosen.weights)


def _mask_only(sweep: int, seconds: float) -> SolveReport:
    nan = float("nan")
    return SolveReport(sweep, nan, nan, nan, "masked weights", NewtonOutcome.NOT_ASKED.value, 0, 0, 0, "", 0.0, seconds)


def _solve_report(solved: Solved, sweep: int, seconds: float) -> SolveReport:
    newton, start = solved.newton, solved.start
    return SolveReport(
        sweep=sweep,
        loss_masked=start.loss_masked,
        loss_start=newton.loss_before,
        loss=solved.loss,
        start=start.name,
        outcome=newton.outcome.value,
        newton_steps=newton.steps,
        cg_steps=newton.cg_steps,
        negative_curvature=newton.negative_curvature,
        curvature=start.curvature,
        relative_damping=start.relative_damping,
        seconds=seconds,
        kept=solved.kept,
        held_out_masked=solved.held_out_masked,
        held_out=solved.held_out,
    )
