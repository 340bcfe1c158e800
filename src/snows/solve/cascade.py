"""The main loop: the paper's Algorithm 3."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.streams import Batches, Stream
from ..devices.memory import Memory
from ..devices.working_memory import working_within
from ..errors import SnowsWarning
from ..events import SolveReport
from ..graph import Graph
from ..graph.segment import Values
from ..masks import Choice, LayerMethod
from ..patterns import Pattern
from ..plan import Plan, PlannedLayer
from ..recipe import Recipe
from ..results.journal import Entry, Journal, laid_out
from .footprint import operations_kept
from .layer import Solved, Turn, solve_layer
from .newton import NewtonOutcome
from .problem import LayerProblem

_REFIT_RIDGE = 1e-4  # of the weights that masks are chosen from: little, as nothing is removed yet


@dataclass(frozen=True)
class Event:
    """One layer, or some that are solved together, has begun in a sweep (`solve` is None) or ended.

    In the last stage (`finishing`) `index` of `total` steps are done, of all layers together.
    """

    layers: tuple[str, ...]
    index: int
    total: int
    sweep: int
    sweeps: int
    solve: SolveReport | None = None
    finishing: bool = False

    @property
    def layer(self) -> str:
        return " + ".join(self.layers)

    def __str__(self) -> str:
        if self.finishing:
            return "finishing, all layers together"
        return f"sweep {self.sweep + 1}/{self.sweeps}  {self.layer}"


# For a sweep, with patterns for its weights as they are then: masks of all layers, or of none where a layer method
# chooses them on the way.
ChooseAll = Callable[[int, Mapping[str, Pattern], Mapping[str, Tensor]], Choice]


def cascade(
    graph: Graph,
    plan: Plan,
    batches: Batches,
    choose: ChooseAll,
    method: LayerMethod | None,
    recipe: Recipe,
    memory: Memory,
    seed: int,
    tell: Callable[[Event], None],
    adjust: bool = True,
    journal: Journal | None = None,
) -> Choice:
    """Re-adjust every planned layer; returns masks and new weights by parameter name. Without `adjust`: masks alone.

    Two streams of the same samples run through one graph: the dense one gives targets, the pruned one gives inputs.
    Each layer (or group: query, key and value of an attention) is solved with all layers before it already pruned and,
    in the first sweep, all behind it still dense. For `mask_steps` sweeps patterns grow sparser; where they do, new
    masks are chosen: all of them by `choose` before the sweep, or each by a layer `method` on the way. What the
    `journal` has is not done again: the streams are moved past it when the next layer needs them.
    """
    assert isinstance(recipe.sweeps, int)  # resolved by the plan
    assert isinstance(recipe.mask_steps, int)
    journal = journal or Journal()
    dense = graph.parameters
    current = dict(dense)
    choice, arrived = Choice({}), plan
    # Of the dense network's operations: what its own stream gives never changes.
    variances: dict[str, float] = {}
    outputs: list[Values] | None = None
    kept = operations_kept(graph, plan, sum(batches.sizes), recipe, memory) if adjust else []

    def streams() -> list[Stream]:
        return [Stream(graph, weights, batches, memory) for weights in (dense, current)]

    for sweep in range(recipe.sweeps):
        dense_stream, pruned_stream = streams()
        before, arrived = arrived, plan.on_the_way(min(1, (sweep + 1) / recipe.mask_steps))
        new_masks = sweep == 0 or arrived.patterns != before.patterns
        if new_masks:
            choice = choose(sweep, arrived.patterns, current)
        groups = arrived.groups
        for index, group in enumerate(groups):
            layers = [planned.layer for planned in group]
            where = (tuple(layer.name for layer in layers), index, len(groups), sweep, recipe.sweeps)
            tell(Event(*where))
            entry = journal.recall(sweep, index)
            while entry is None:
                began = time.perf_counter()
                segment = graph.segment(layers, group[0].horizon)
                problem: LayerProblem | None = None
                try:
                    if kept and outputs is None:
                        outputs = graph.outputs_of(kept, batches.values)
                    if outputs is None or new_masks:  # later nothing else of it is read
                        dense_stream.advance(segment.position)
                    pruned_stream.advance(segment.position)
                    known = variances if recipe.targets == "dense-stream" else {}
                    room = memory.targets(graph.live_bytes(segment.position), sum(batches.sizes))
                    problem = LayerProblem(segment, dense_stream, pruned_stream, recipe.targets, room, known, outputs)
                    if new_masks and method is not None:
                        with working_within(memory.choosing):
                            _choose_masks(method, group, problem, current, choice, adjust)
                    so_far = {**current, **choice.weights} if new_masks else current
                    turn = Turn(seed, sweep, index, new_masks)
                    entry = _solve(problem, so_far, choice.masks, recipe, memory, turn, adjust, began)
                except torch.OutOfMemoryError:
                    pass  # only outside of this block is what filled the memory let go
                problem = None  # with its activations, before the streams move on
                if entry is None:
                    outputs, kept = None, []
                    batches = _in_smaller_pieces(batches, where[0])
                    dense_stream, pruned_stream = streams()
                else:
                    journal.record(sweep, index, entry)
            current.update(entry.weights)
            choice.masks.update(entry.masks)
            tell(Event(*where, solve=entry.solve))
    names = [planned.layer.parameter for planned in plan.pruned]
    return Choice({name: choice.masks[name] for name in names}, {name: current[name] for name in names})


def _solve(
    problem: LayerProblem,
    weights: Mapping[str, Tensor],
    all_masks: Mapping[str, Tensor],
    recipe: Recipe,
    memory: Memory,
    turn: Turn,
    adjust: bool,
    began: float,
) -> Entry:
    """The problem's layers, re-adjusted from these weights; or masked, and that is all."""
    names = [layer.parameter for layer in problem.layers]
    masks = laid_out({name: all_masks[name] for name in names})
    masked = laid_out({name: weights[name] * mask for name, mask in masks.items()})
    if not adjust:
        return Entry(masked, masks, _mask_only(turn.sweep, time.perf_counter() - began))
    pack, unpack = problem.packing.pack, problem.packing.unpack
    solved = solve_layer(problem, pack(list(masked.values())), pack(list(masks.values())), recipe, memory, turn)
    new = laid_out(dict(zip(names, unpack(solved.weight), strict=True)))
    return Entry(new, masks, _solve_report(solved, turn.sweep, time.perf_counter() - began))


def _in_smaller_pieces(batches: Batches, layers: tuple[str, ...]) -> Batches:
    """After the device ran out of memory."""
    torch.cuda.empty_cache()
    if batches.smaller is None:
        raise torch.OutOfMemoryError(f"{layers[0]} does not fit the device's memory, not even with single samples")
    smaller = batches.smaller()
    warnings.warn(
        f"out of memory at {layers[0]}: going on with {smaller.sizes[0]} samples at a time, not {batches.sizes[0]}",
        SnowsWarning,
        stacklevel=2,
    )
    return smaller


def _choose_masks(
    method: LayerMethod,
    group: tuple[PlannedLayer, ...],
    problem: LayerProblem,
    weights: Mapping[str, Tensor],
    choice: Choice,
    adjust: bool,
) -> None:
    """Ask the method for each layer of the problem, with the statistics it wants (see LayerMethod), which of its
    weights, as they are now, to keep."""
    reads = getattr(method, "reads", "pruned")
    if reads == "auto":
        reads = "dense" if adjust else "refitted"
    for place, planned in enumerate(group):
        assert planned.pattern is not None
        name = planned.layer.parameter
        weight = weights[name]
        if reads == "dense":
            gram = problem.dense_gram(place)
        else:
            moments = problem.moments(place)
            gram = moments.gram
            if reads == "refitted":
                weight = moments.refit(weight.flatten(1), _REFIT_RIDGE).view_as(weight)
        chosen = method.choose_layer(name, weight, gram, planned.pattern)
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
