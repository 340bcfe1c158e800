"""One layer, or several that are solved together: the paper's Algorithm 2, sub-sampled Newton on the K-step loss."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..data.moments import Moments
from ..devices.memory import Memory
from ..errors import SnowsWarning, StatisticsError
from ..events import Listener, SolveReport, ignore
from ..graph import Segment
from .footprint import linearized_bytes
from .least_squares import RowPreconditioner, RowSystems, row_systems
from .newton import NewtonOutcome, NewtonResult, System, newton
from .objective import CurvatureKind, Objective, restrict
from .problem import LayerProblem
from .settings import ALL_SAMPLES, CurvatureSettings, Settings

_SAMPLES_PER_INPUT, _LEAST_SAMPLES = 7, 100  # in curvature products
_PARTS_OF_THE_WAY = (("half of the way", 0.5), ("a quarter of the way", 0.25))


@dataclass(frozen=True)
class Turn:
    """Which solve of a run this is.

    Random numbers depend on these numbers alone. They do not depend on what was solved before, so that an interrupted
    run can be resumed, nor on the names of layers.
    """

    seed: int
    sweep: int
    index: int
    new_mask: bool = True  # if not, the weights were already solved under this mask, and least squares is not tried

    def generator(self) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}/{self.sweep}/{self.index}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@dataclass(frozen=True)
class SolvedLayer:
    """The weights and masks of the layers that were solved together, by parameter name."""

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
    notify: Listener = ignore,
) -> SolvedLayer:
    """Re-adjust the weights that the masks keep, by Newton-CG on the K-step loss.

    No layer gets worse: the masked weights, the start and the solution are compared on held-out samples, and the best
    is kept.
    """
    names = [layer.parameter for layer in problem.layers]
    kept = contiguous({name: masks[name] for name in names})
    masked = contiguous({name: weights[name] * kept[name] for name in names})
    pack, unpack = problem.packing.pack, problem.packing.unpack
    solve = _Solve(problem, pack(list(masked.values())), pack(list(kept.values())), settings, memory, turn, notify)
    start = solve.start()
    solution = solve.solution(start)
    best = solve.best_on_held_out(start, solution)
    new = contiguous(dict(zip(names, unpack(best.weight), strict=True)))
    return SolvedLayer(new, kept, _report(start, solution, best, turn.sweep))


def mask_layer(
    names: Sequence[str], weights: Mapping[str, Tensor], masks: Mapping[str, Tensor], sweep: int
) -> SolvedLayer:
    """The masked weights. Nothing is re-adjusted."""
    kept = contiguous({name: masks[name] for name in names})
    masked = contiguous({name: weights[name] * kept[name] for name in names})
    nan = math.nan
    outcome = NewtonOutcome.MASK_ONLY.value
    report = SolveReport(
        sweep, nan, nan, nan, "masked weights", outcome, 0, 0, 0, "", relative_damping=0.0, seconds=0.0
    )
    return SolvedLayer(masked, kept, report)


def contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in the memory layout that they have after saving and loading.

    A resumed run must end with the same weights, and sums over another layout round differently.
    """
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def curvature_kind(settings: CurvatureSettings, segment: Segment) -> CurvatureKind:
    if settings.kind != "exact":
        return settings.kind
    return "gauss-newton" if segment.piecewise_linear else "hessian"


def derivative_precision(
    settings: CurvatureSettings, segment: Segment, device: torch.device, dtype: torch.dtype
) -> torch.dtype:
    """bfloat16 on a GPU: it takes half the time, and CG tolerates the rounding. Losses are always in full precision."""
    halved = settings.half_precision and device.type == "cuda" and dtype == torch.float32
    return torch.bfloat16 if halved and segment.piecewise_linear else dtype


def samples_in_products(settings: CurvatureSettings, inputs: Sequence[int]) -> int:
    """How many samples a curvature product takes: a few for each input that an output keeps.

    `inputs` is the largest number of kept inputs of an output, for each of the layers.
    """
    if settings.samples == ALL_SAMPLES:
        return ALL_SAMPLES
    return min(settings.samples, max(_LEAST_SAMPLES, _SAMPLES_PER_INPUT * max(inputs)))


@dataclass(frozen=True)
class _Start:
    """Where Newton's method begins."""

    weight: Tensor
    name: str
    loss: float  # NaN: not computed, because there is no other candidate
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
    tried: tuple[_Candidate, ...] = ()  # all that were compared, in their order


class _Solve:
    """One solve in three steps: a start, Newton's method from there, and the choice by held-out samples.

    Weights and masks are packed into one tensor.
    """

    def __init__(
        self,
        problem: LayerProblem,
        masked: Tensor,
        mask: Tensor,
        settings: Settings,
        memory: Memory,
        turn: Turn,
        notify: Listener,
    ) -> None:
        self.notify = notify
        self.problem, self.masked, self.mask = problem, masked, mask
        self.settings, self.memory, self.turn = settings, memory, turn
        self.segment, self.pack, self.unpack = problem.segment, problem.packing.pack, problem.packing.unpack
        self.kind = curvature_kind(settings.curvature, problem.segment)
        self.precision = derivative_precision(settings.curvature, problem.segment, masked.device, masked.dtype)
        self.objective = problem.objective(settings.normalization, self.precision)
        self.closed_form = settings.start.closed_form and turn.new_mask
        self.blocks, self.moments = self._row_blocks()

    def start(self) -> _Start:
        """Least squares, or the masked weights if these have a lower loss."""
        start = _Start(self.masked, "masked weights", math.nan, None, math.nan, self.kind)
        if not self.closed_form and not self.settings.in_minibatches:
            return start  # Newton's method computes its loss
        if not self.blocks or not self.closed_form:
            loss = self.objective.loss(self.masked)
            return replace(start, loss=loss, loss_masked=loss)
        refit, loss = self._refit()
        damping = max(block.relative_damping for block in self.blocks)
        start = replace(start, loss=loss, loss_masked=loss, relative_damping=damping)
        gradient = None
        if self.segment.is_one_layer or self.settings.in_minibatches:
            loss_refit = self.objective.loss(refit)
        else:  # Newton's method will most likely start here and needs the gradient
            loss_refit, gradient = self.objective.loss_and_gradient(refit)
        if not loss_refit < loss:
            return start
        return replace(start, weight=refit, name="least squares", loss=loss_refit, gradient=gradient)

    def _refit(self) -> tuple[Tensor, float]:
        """The least-squares weights of all layers, one after another, and the loss of the masked weights."""
        weights = list(self.unpack(self.masked))
        held_out = self.objective.subset(self.problem.held_out)
        for index, (block, moments) in enumerate(zip(self.blocks, self.moments, strict=True)):

            def judge(rows: Tensor, index: int = index) -> float:
                tried = [*weights[:index], rows.view_as(weights[index]), *weights[index + 1 :]]
                return held_out.loss(self.pack(tried))

            refit = block.refit(weights[index].flatten(1), moments, judge if self.problem.held_out else None)
            weights[index] = refit.weight.view_as(weights[index])
        if not self.segment.is_one_layer:
            return self.pack(weights), self.objective.loss(self.masked)
        positions = moments.positions  # moments are enough for a squared error: no pass over the samples
        loss = self.objective.of_squared_error(refit.error_before * positions, positions * len(refit.weight))
        return self.pack(weights), loss

    def solution(self, start: _Start) -> NewtonResult:
        """Newton's method from the start, on all samples or in mini-batches."""
        if self.segment.is_one_layer and start.weight is not self.masked:  # least squares is the minimum already
            return NewtonResult(start.weight, start.loss, start.loss, 0, 0, NewtonOutcome.CLOSED_FORM)
        if self.settings.in_minibatches:
            return self._on_minibatches(start)
        return self._on_all_samples(start)

    def best_on_held_out(self, start: _Start, solution: NewtonResult) -> _Candidate:
        """The best of masked weights, start and solution. If no samples are held out: the solution."""
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

    def _row_blocks(self) -> tuple[list[RowSystems], list[Moments]]:
        """The factors of each layer's least squares, and its moments if there will be a closed form."""
        settings, dtype = self.settings, self.masked.dtype
        if not self.closed_form and not settings.curvature.preconditioned:
            return [], []
        layers = range(len(self.segment.layers))
        moments: list[Moments] = []
        if self.closed_form:  # needs all samples and double precision
            moments = [self.problem.moments(index) for index in layers]
            grams = [m.gram for m in moments]
            ridge = settings.start.ridge
        else:  # the preconditioner needs less: some samples, and the damping of Newton's system
            samples = settings.curvature.samples
            grams = [self.problem.gram(index, samples).to(dtype) for index in layers]
            ridge = max(settings.start.ridge, settings.newton.relative_damping)
        masks = [part.flatten(1) for part in self.unpack(self.mask)]
        product_flops = 0.0
        if settings.curvature.preconditioned and not self.segment.is_one_layer:
            samples = min(settings.curvature.samples, self.objective.samples)
            product_flops = 2.0 * self.segment.cost.flops * samples
        try:
            blocks = self.objective.ranks.together(
                lambda: [
                    row_systems(gram, kept, ridge, dtype, product_flops, self.memory.factors, self.memory.chunk)
                    for gram, kept in zip(grams, masks, strict=True)
                ]
            )
        except StatisticsError as error:
            message = f"{self.segment.layers[0].name}: {error}; this layer is solved without its closed form"
            warnings.warn(message, SnowsWarning, stacklevel=2)
            return [], []
        return blocks, moments

    def _on_all_samples(self, start: _Start) -> NewtonResult:
        """Sub-sampled Newton: gradient and line search on all samples, curvature products on some of them."""
        inputs = [int(part.flatten(1).sum(1).max()) for part in self.unpack(self.mask)]
        samples = samples_in_products(self.settings.curvature, inputs)
        ranks = self.objective.ranks
        if samples < ALL_SAMPLES:
            wanted = min(samples, self.objective.samples)
            own = self.memory.fitting_samples(ranks.share(wanted), self._linearized_bytes(), self.problem.sizes[0])
            samples = min(wanted, ranks.size * own)
        narrow = self.problem.narrowed(samples)
        sampled = narrow.objective(self.settings.normalization, self.precision)
        steps_before = self.turn.sweep * self.settings.newton.steps
        subsets = _rotating_subsets(narrow.block_sizes, samples, steps_before)
        at_start = None if start.gradient is None else (start.loss, start.gradient)

        def system(at: Tensor, step: int) -> System:
            return self._system(sampled.subset(narrow.pieces_of(subsets(step))), at)

        return newton(self.objective, system, start.weight, self.mask, self.settings.newton, at_start, self.notify)

    def _on_minibatches(self, start: _Start) -> NewtonResult:
        """Algorithm 2 as written: gradient, line search and products on the same mini-batch, one after another."""
        total = NewtonResult(start.weight, start.loss, start.loss, 0, 0, NewtonOutcome.STEPS_DONE)
        for part in _consecutive(self.problem.block_sizes, self.settings.minibatch):
            batch = self.objective.subset(self.problem.pieces_of(part))

            def system(at: Tensor, _: int, batch: Objective = batch) -> System:
                return self._system(batch, at)

            solved = newton(batch, system, total.weight, self.mask, self.settings.newton, notify=self.notify)
            total = replace(
                total,
                weight=solved.weight,
                steps=total.steps + solved.steps,
                cg_steps=total.cg_steps + solved.cg_steps,
                negative_curvature=total.negative_curvature + solved.negative_curvature,
            )
        return replace(total, loss=self.objective.loss(total.weight))

    def _linearized_bytes(self) -> int:
        """Bytes of the linearized segment, for one sample."""
        return linearized_bytes(self.segment.cost, self.kind, self.precision)

    def _system(self, curvature: Objective, at: Tensor) -> System:
        """The Newton system on the kept weights, preconditioned with the row blocks."""
        keep = self._linearized_bytes() * curvature.samples_of_a_rank <= self.memory.products
        product = restrict(curvature.product(self.kind, at, keep), self.mask)
        if not self.settings.curvature.preconditioned or not self.blocks:
            return System(product)
        coins = torch.randint(0, 2, self.mask.shape, generator=self.turn.generator(), dtype=torch.int8)
        probe = (2 * coins.to(self.mask.device).to(at.dtype) - 1) * self.mask
        # Rows of query and key matter far less than rows of value: these must keep their own scales.
        similar_rows = self.segment.is_matched_itself
        precondition = RowPreconditioner(self.blocks, self.unpack(probe), self.unpack(product(probe)), similar_rows)
        return System(
            product, precondition.mean_diagonal, lambda residual: self.pack(precondition(self.unpack(residual)))
        )


def _best(held_out: Objective, candidates: Sequence[_Candidate]) -> _Candidate:
    """The candidate with the lowest loss on held-out samples. The first is the masked weights, the last the solution.

    A solution may overfit the fitted samples. Then the points half and a quarter of the way to it are tried as well.
    """

    def measured(candidate: _Candidate) -> _Candidate:
        loss = held_out.loss(candidate.weight)
        return replace(candidate, held_out=loss if math.isfinite(loss) else math.inf)

    candidates = [measured(candidate) for candidate in candidates]
    best, solved = min(candidates, key=lambda candidate: candidate.held_out), candidates[-1]
    if best is not solved and math.isfinite(solved.held_out):
        for name, share in _PARTS_OF_THE_WAY:
            part = measured(_Candidate(name, best.weight + share * (solved.weight - best.weight)))
            candidates.append(part)
            if part.held_out < best.held_out:
                best = part
                break
    return replace(best, held_out_masked=candidates[0].held_out, tried=tuple(candidates))


def _loss_masked(start: _Start, solution: NewtonResult) -> float:
    return solution.loss_before if math.isnan(start.loss_masked) else start.loss_masked


def _report(start: _Start, solution: NewtonResult, best: _Candidate, sweep: int) -> SolveReport:
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
        held_out_tried={tried.name: tried.held_out for tried in best.tried},
        losses=solution.losses,
        cg_residuals=tuple(tuple(float(f"{norm:.4g}") for norm in solve) for solve in solution.cg_residuals),
    )


def _rotating_subsets(sizes: tuple[int, ...], samples: int, steps_before: int) -> Callable[[int], tuple[int, ...]]:
    """For each step, blocks with about `samples` samples. The next step takes the next blocks, and so does a sweep."""
    if samples >= sum(sizes):
        return lambda step: tuple(range(len(sizes)))
    count = max(1, round(samples / sizes[0]))
    return lambda step: tuple(sorted({((steps_before + step) * count + i) % len(sizes) for i in range(count)}))


def _consecutive(sizes: tuple[int, ...], samples: int) -> list[tuple[int, ...]]:
    """Consecutive blocks with about `samples` samples each: the mini-batches of Algorithm 2."""
    count = max(1, round(samples / sizes[0]))
    return [tuple(range(i, min(i + count, len(sizes)))) for i in range(0, len(sizes), count)]
