"""One layer, or several that are solved together: the paper's Algorithm 2, sub-sampled Newton on the K-step loss."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..devices.memory import Memory
from ..errors import SnowsWarning, StatisticsError
from ..events import SolveReport
from ..graph import Segment
from .footprint import linearized_bytes
from .least_squares import RowBlocks, RowPreconditioner
from .newton import Newton, NewtonOutcome, System, newton
from .objective import CurvatureKind, Objective, restrict
from .problem import LayerProblem
from .settings import ALL_SAMPLES, CurvatureSettings, Settings

_SAMPLES_PER_INPUT, _LEAST_SAMPLES = 7, 100  # in products
_PARTS_OF_THE_WAY = (("half of the way", 0.5), ("a quarter of the way", 0.25))


@dataclass(frozen=True)
class Turn:
    """Which solve of a run this is.

    Random numbers depend on it alone: not on the order of calls, so that an interrupted run can be repeated, and not on
    names, so that it does not matter how a network is written.
    """

    seed: int
    sweep: int
    index: int
    new_mask: bool = True  # then least squares may be better than the weights so far

    def generator(self) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}/{self.sweep}/{self.index}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@dataclass(frozen=True)
class SolvedLayer:
    """The layers of one step after one sweep, by parameter name."""

    weights: dict[str, Tensor]
    masks: dict[str, Tensor]
    solve: SolveReport


def solve_layer(
    problem: LayerProblem,
    weights: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    settings: Settings,
    memory: Memory,
    turn: Turn,
) -> SolvedLayer:
    """Re-adjust the weights that the masks keep, by Newton-CG on the K-step loss.

    No layer gets worse: of the masked weights, the start and the solution, the best on held-out samples is kept.
    """
    names = [layer.parameter for layer in problem.layers]
    kept = contiguous({name: masks[name] for name in names})
    masked = contiguous({name: weights[name] * kept[name] for name in names})
    pack, unpack = problem.packing.pack, problem.packing.unpack
    solve = _Solve(problem, pack(list(masked.values())), pack(list(kept.values())), settings, memory, turn)
    start = solve.start()
    solution = solve.solution(start)
    best = solve.best_on_held_out(start, solution)
    new = contiguous(dict(zip(names, unpack(best.weight), strict=True)))
    return SolvedLayer(new, kept, _report(start, solution, best, turn.sweep))


def mask_layer(
    names: Sequence[str], weights: Mapping[str, Tensor], masks: Mapping[str, Tensor], sweep: int
) -> SolvedLayer:
    """The masked weights, and nothing re-adjusted."""
    kept = contiguous({name: masks[name] for name in names})
    masked = contiguous({name: weights[name] * kept[name] for name in names})
    nan = math.nan
    outcome = NewtonOutcome.NOT_ASKED.value
    report = SolveReport(
        sweep, nan, nan, nan, "masked weights", outcome, 0, 0, 0, "", relative_damping=0.0, seconds=0.0
    )
    return SolvedLayer(masked, kept, report)


def contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in the memory layout that they have after saving and loading.

    Sums over another layout round differently, and a resumed run must end with the same weights.
    """
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def curvature_kind(settings: CurvatureSettings, segment: Segment) -> CurvatureKind:
    if settings.kind != "exact":
        return settings.kind
    return "gauss-newton" if segment.piecewise_linear else "hessian"


def derivative_precision(
    settings: CurvatureSettings, segment: Segment, device: torch.device, dtype: torch.dtype
) -> torch.dtype:
    """On a GPU bfloat16 takes half the time, and CG tolerates the rounding. Losses are always in full precision."""
    halved = settings.half_precision and device.type == "cuda" and dtype == torch.float32
    return torch.bfloat16 if halved and segment.piecewise_linear else dtype


def samples_in_products(settings: CurvatureSettings, inputs: Sequence[int]) -> int:
    """More samples where an output keeps more `inputs`, so that the curvature of every layer is known equally well."""
    if settings.samples == ALL_SAMPLES:
        return ALL_SAMPLES
    return min(settings.samples, max(_LEAST_SAMPLES, _SAMPLES_PER_INPUT * max(inputs)))


@dataclass(frozen=True)
class _Start:
    """Where Newton's method begins."""

    weight: Tensor
    name: str
    loss: float  # NaN: not computed, as there was nothing to compare
    gradient: Tensor | None
    loss_masked: float
    curvature: CurvatureKind
    relative_damping: float = 0.0


@dataclass(frozen=True)
class _Candidate:
    """Weights that may be kept, with their losses on fitted and on held-out samples."""

    name: str
    weight: Tensor
    loss: float = math.nan
    held_out: float = math.nan
    held_out_masked: float = math.nan


class _Solve:
    """What one solve works with, and its three steps. Weights are packed into one tensor, as the problem packs them."""

    def __init__(
        self, problem: LayerProblem, masked: Tensor, mask: Tensor, settings: Settings, memory: Memory, turn: Turn
    ) -> None:
        self.problem, self.masked, self.mask = problem, masked, mask
        self.settings, self.memory, self.turn = settings, memory, turn
        self.segment, self.pack, self.unpack = problem.segment, problem.packing.pack, problem.packing.unpack
        self.kind = curvature_kind(settings.curvature, problem.segment)
        precision = derivative_precision(settings.curvature, problem.segment, masked.device, masked.dtype)
        self.objective = problem.objective(settings.normalization, precision)
        self.closed_form = settings.start.closed_form and turn.new_mask
        self.blocks, self.cross = self._row_blocks()

    def start(self) -> _Start:
        """Least squares, or the masked weights where these are better."""
        start = _Start(self.masked, "masked weights", math.nan, None, math.nan, self.kind)
        if not self.closed_form and not self.settings.in_minibatches:
            return start  # Newton's method computes the loss there
        loss = self.objective.loss(self.masked)
        start = replace(start, loss=loss, loss_masked=loss)
        if not self.blocks or not self.closed_form:
            return start
        start = replace(start, relative_damping=max(block.relative_damping for block in self.blocks))
        parts = zip(self.blocks, self.unpack(self.masked), self.cross, strict=True)
        refit = self.pack([block.refit(part.flatten(1), cross).weight.view_as(part) for block, part, cross in parts])
        gradient = None
        if self.segment.is_one_layer or self.settings.in_minibatches:
            loss_refit = self.objective.loss(refit)
        else:  # Newton's method most likely begins here
            loss_refit, gradient = self.objective.loss_and_gradient(refit)
        if not loss_refit < loss:
            return start
        return replace(start, weight=refit, name="least squares", loss=loss_refit, gradient=gradient)

    def solution(self, start: _Start) -> Newton:
        """Newton's method from the start, on all samples or on one mini-batch after another."""
        if self.segment.is_one_layer and start.weight is not self.masked:  # least squares is the minimum
            return Newton(start.weight, start.loss, start.loss, 0, 0, NewtonOutcome.CLOSED_FORM)
        if self.settings.in_minibatches:
            return self._on_minibatches(start)
        return self._on_all_samples(start)

    def best_on_held_out(self, start: _Start, solution: Newton) -> _Candidate:
        """The best of masked weights, start and solution. Without held-out samples: the solution."""
        solved = _Candidate("solved", solution.weight, solution.loss)
        if not self.problem.held_out:
            return solved
        candidates = [_Candidate("masked weights", self.masked, _loss_masked(start, solution))]
        if start.weight is not self.masked:
            candidates.append(_Candidate(start.name, start.weight, solution.loss_before))
        if solution.weight is not start.weight:
            candidates.append(solved)
        best = _best(self.objective.subset(self.problem.held_out), candidates)
        if math.isnan(best.loss):
            best = replace(best, loss=self.objective.loss(best.weight))
        return replace(best, name="solved") if best.weight is solution.weight else best

    def _row_blocks(self) -> tuple[list[RowBlocks], list[Tensor]]:
        """The factors of each layer's least squares, and the cross moments where the closed form is wanted."""
        settings, dtype = self.settings, self.masked.dtype
        if not self.closed_form and not settings.curvature.preconditioned:
            return [], []
        layers = range(len(self.segment.layers))
        cross: list[Tensor] = []
        if self.closed_form:  # needs all samples and double precision
            moments = [self.problem.moments(index) for index in layers]
            grams, cross = [m.gram for m in moments], [m.cross for m in moments]
            ridge = settings.start.ridge
        else:  # a preconditioner approximates the damped system
            samples = settings.curvature.samples
            grams = [self.problem.gram(index, samples).to(dtype) for index in layers]
            ridge = max(settings.start.ridge, settings.newton.relative_damping)
        masks = [part.flatten(1) for part in self.unpack(self.mask)]
        try:
            blocks = [
                RowBlocks(gram, kept, ridge, dtype, self.memory.factors, self.memory.chunk)
                for gram, kept in zip(grams, masks, strict=True)
            ]
        except StatisticsError as error:
            message = f"{self.segment.layers[0].name}: {error}; it is solved without its closed form"
            warnings.warn(message, SnowsWarning, stacklevel=2)
            return [], []
        return blocks, cross

    def _on_all_samples(self, start: _Start) -> Newton:
        """Gradient and line search on all samples, products on some."""
        inputs = [int(part.flatten(1).sum(1).max()) for part in self.unpack(self.mask)]
        samples = samples_in_products(self.settings.curvature, inputs)
        if samples < ALL_SAMPLES:
            wanted = min(samples, self.objective.samples)
            samples = self.memory.fitting_samples(wanted, self._linearized_bytes(), self.problem.sizes[0])
        narrow = self.problem.narrowed(samples)
        sampled = narrow.objective(self.settings.normalization, self.objective.precision)
        begin = self.turn.sweep * self.settings.newton.steps
        subsets = _rotating_subsets(narrow.sizes[: len(sampled.chosen)], samples, begin)
        known = None if start.gradient is None else (start.loss, start.gradient)

        def system(at: Tensor, step: int) -> System:
            return self._system(sampled.subset(subsets(step)), at)

        return newton(self.objective, system, start.weight, self.mask, self.settings.newton, known)

    def _on_minibatches(self, start: _Start) -> Newton:
        """Algorithm 2 as written: gradient, line search and products on one mini-batch after another."""
        total = Newton(start.weight, start.loss, start.loss, 0, 0, NewtonOutcome.STEPS_DONE)
        for part in _consecutive(self.problem.sizes[: len(self.objective.chosen)], self.settings.minibatch):
            batch = self.objective.subset(part)

            def system(at: Tensor, _: int, batch: Objective = batch) -> System:
                return self._system(batch, at)

            solved = newton(batch, system, total.weight, self.mask, self.settings.newton)
            total = replace(
                total,
                weight=solved.weight,
                steps=total.steps + solved.steps,
                cg_steps=total.cg_steps + solved.cg_steps,
                negative_curvature=total.negative_curvature + solved.negative_curvature,
            )
        return replace(total, loss=self.objective.loss(total.weight))

    def _linearized_bytes(self) -> int:
        """For one sample."""
        return linearized_bytes(self.segment.cost, self.kind, self.objective.precision or self.masked.dtype)

    def _system(self, curvature: Objective, at: Tensor) -> System:
        """Newton's system on kept weights, preconditioned with the row blocks."""
        keep = self._linearized_bytes() * curvature.samples <= self.memory.products
        product = restrict(curvature.product(self.kind, at, keep), self.mask)
        if not self.settings.curvature.preconditioned or not self.blocks:
            return System(product)
        coins = torch.randint(0, 2, self.mask.shape, generator=self.turn.generator(), dtype=torch.int8)
        probe = (2 * coins.to(self.mask.device).to(at.dtype) - 1) * self.mask
        # Rows of query and key matter far less than those of value, so there the rows are not drawn to their mean.
        similar_rows = self.segment.is_matched_itself
        rows = RowPreconditioner(self.blocks, self.unpack(probe), self.unpack(product(probe)), similar_rows)
        return System(product, rows.mean_diagonal, lambda residual: self.pack(rows(self.unpack(residual))))


def _best(held_out: Objective, candidates: Sequence[_Candidate]) -> _Candidate:
    """The candidate with the lowest loss on held-out samples; the first one is the masked weights.

    The last one is the solution. Where it fits the fitted samples alone, a part of the way to it may still be the best.
    """

    def judged(candidate: _Candidate) -> _Candidate:
        loss = held_out.loss(candidate.weight)
        return replace(candidate, held_out=loss if math.isfinite(loss) else math.inf)

    candidates = [judged(candidate) for candidate in candidates]
    best, solved = min(candidates, key=lambda candidate: candidate.held_out), candidates[-1]
    if best is not solved and math.isfinite(solved.held_out):
        for name, share in _PARTS_OF_THE_WAY:
            part = judged(_Candidate(name, best.weight + share * (solved.weight - best.weight)))
            if part.held_out < best.held_out:
                best = part
                break
    return replace(best, held_out_masked=candidates[0].held_out)


def _loss_masked(start: _Start, solution: Newton) -> float:
    return solution.loss_before if math.isnan(start.loss_masked) else start.loss_masked


def _report(start: _Start, solution: Newton, best: _Candidate, sweep: int) -> SolveReport:
    return SolveReport(
        sweep=sweep,
        loss_masked=_loss_masked(start, solution),
        loss_start=solution.loss_before,
        loss=best.loss,
        start=start.name,
        outcome=solution.outcome.value,
        newton_steps=solution.steps,
        cg_steps=solution.cg_steps,
        negative_curvature=solution.negative_curvature,
        curvature=start.curvature,
        relative_damping=start.relative_damping,
        seconds=0.0,
        kept=best.name,
        held_out_masked=best.held_out_masked,
        held_out=best.held_out,
    )


def _rotating_subsets(sizes: tuple[int, ...], samples: int, turn: int) -> Callable[[int], tuple[int, ...]]:
    """For each step, pieces with about `samples` samples: other pieces at each step and sweep."""
    if samples >= sum(sizes):
        return lambda step: tuple(range(len(sizes)))
    count = max(1, round(samples / sizes[0]))
    return lambda step: tuple(sorted({((turn + step) * count + i) % len(sizes) for i in range(count)}))


def _consecutive(sizes: tuple[int, ...], samples: int) -> list[tuple[int, ...]]:
    """Pieces in groups of about `samples` samples: the mini-batches of Algorithm 2."""
    count = max(1, round(samples / sizes[0]))
    return [tuple(range(i, min(i + count, len(sizes)))) for i in range(0, len(sizes), count)]
