"""One layer, or some together: the paper's Algorithm 2, sub-sampled Newton on the K-step loss."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..devices.memory import Memory
from ..errors import SnowsWarning, StatisticsError
from ..graph import Segment
from ..recipe import Recipe
from .cg import CGOptions
from .footprint import linearized_bytes
from .least_squares import RowBlocks, RowPreconditioner
from .newton import Newton, NewtonOptions, NewtonOutcome, System, newton
from .objective import CurvatureKind, Objective, restrict
from .problem import LayerProblem

_SAMPLES_PER_INPUT, _LEAST_SAMPLES = 7, 100  # in products
_PARTS_OF_THE_WAY = (("half of the way", 0.5), ("a quarter of the way", 0.25))


@dataclass(frozen=True)
class Turn:
    """Which solve of a run this is. Randomness is keyed by it, never by the order of calls (so an interrupted run can
    be repeated) nor by names (so it does not matter how a network is spelled)."""

    seed: int
    sweep: int
    index: int
    new_mask: bool = True  # so that least squares may do better than the weights so far

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
    """A layer's weight after a solve. `kept` says which: the solve's own, or where that did better on held-out samples
    the start, or a part of the way from there."""

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
    found, start = _Solve(problem, objective, masked, mask, recipe, memory, turn).run()
    if not problem.held_out:
        return Solved(found.weight, found.loss, found, start, "solved", math.nan, math.nan)
    candidates = [_Candidate("masked weights", masked, start.loss_masked)]
    if start.weight is not masked:
        candidates.append(_Candidate(start.name, start.weight, found.loss_before))
    if found.weight is not start.weight:
        candidates.append(_Candidate("solved", found.weight, found.loss))
    best, held_out, held_out_masked = _best_on_held_out(objective, problem.held_out, candidates)
    kept = "solved" if best.weight is found.weight else best.name
    loss = objective.loss(best.weight) if best.loss is None else best.loss
    return Solved(best.weight, loss, found, start, kept, held_out_masked, held_out)


@dataclass(frozen=True)
class _Candidate:
    name: str
    weight: Tensor
    loss: float | None = None  # of the fitted samples, where it is known


def _best_on_held_out(
    objective: Objective, held_out: Sequence[int], candidates: Sequence[_Candidate]
) -> tuple[_Candidate, float, float]:
    """With its loss there, and that of the first. The last candidate is the solve's: where it went too far, that is
    for fitted samples alone, a part of its way may still be the best."""
    judge = objective.subset(held_out)

    def loss(candidate: _Candidate) -> float:
        value = judge.loss(candidate.weight)
        return value if math.isfinite(value) else math.inf

    losses = [loss(candidate) for candidate in candidates]
    least = min(losses)
    best, solved = candidates[losses.index(least)], candidates[-1]
    if best is not solved and math.isfinite(losses[-1]):
        for name, share in _PARTS_OF_THE_WAY:
            part = _Candidate(name, best.weight + share * (solved.weight - best.weight))
            value = loss(part)
            if value < least:
                return part, value, losses[0]
    return best, least, losses[0]


class _Solve:
    """What one solve works with, and its stages: the start, then Newton's method on all samples or on mini-batches."""

    def __init__(
        self,
        problem: LayerProblem,
        objective: Objective,
        masked: Tensor,
        mask: Tensor,
        recipe: Recipe,
        memory: Memory,
        turn: Turn,
    ) -> None:
        self.problem, self.objective, self.masked, self.mask = problem, objective, masked, mask
        self.recipe, self.memory, self.turn = recipe, memory, turn
        self.segment, self.pack, self.unpack = problem.segment, problem.packing.pack, problem.packing.unpack
        self.kind = curvature_kind(recipe, problem.segment)
        self.closed_form = recipe.start == "closed-form" and turn.new_mask
        self.blocks, self.cross = self._row_blocks()

    def run(self) -> tuple[Newton, Start]:
        """From the better of two starts; where the mask is no new one, the weights so far always are."""
        start, loss, gradient = self._start()
        if self.segment.is_one_layer and start.weight is not self.masked:  # nothing is left for Newton to do
            return Newton(start.weight, loss, loss, 0, 0, NewtonOutcome.CLOSED_FORM), start
        if self.recipe.minibatch is not None:
            return self._on_minibatches(start.weight, loss, self.recipe.minibatch), start
        newton = self._on_all_samples(start.weight, None if gradient is None else (loss, gradient))
        return newton, start if self.closed_form else replace(start, loss_masked=newton.loss_before)

    def _row_blocks(self) -> tuple[list[RowBlocks], list[Tensor]]:
        """Of each layer, with the second moments of its inputs and targets where a closed form is asked for."""
        recipe, dtype = self.recipe, self.masked.dtype
        if not self.closed_form and recipe.preconditioner is None:
            return [], []
        layers = range(len(self.segment.layers))
        cross: list[Tensor] = []
        if self.closed_form:  # which needs all samples and double precision
            moments = [self.problem.moments(index) for index in layers]
            grams, cross = [m.gram for m in moments], [m.cross for m in moments]
            ridge = recipe.ridge
        else:  # a preconditioner stands for the damped system
            grams = [self.problem.gram(index, recipe.product_samples).to(dtype) for index in layers]
            ridge = max(recipe.ridge, recipe.relative_damping)
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

    def _start(self) -> tuple[Start, float, Tensor | None]:
        """Least squares, or the weights so far where these are better: with the loss there and, if known, its gradient.

        Where nothing is to be compared the loss is not known: Newton's method will say what it is.
        """
        start = Start(self.masked, "masked weights", math.nan, 0.0, self.kind)
        if not self.closed_form and self.recipe.minibatch is None:
            return start, math.nan, None
        loss = self.objective.loss(self.masked)
        start = replace(start, loss_masked=loss)
        if not self.blocks or not self.closed_form:
            return start, loss, None
        start = replace(start, relative_damping=max(block.relative_damping for block in self.blocks))
        parts = zip(self.blocks, self.unpack(self.masked), self.cross, strict=True)
        refit = self.pack([block.refit(part.flatten(1), cross).weight.view_as(part) for block, part, cross in parts])
        gradient = None
        if self.segment.is_one_layer or self.recipe.minibatch is not None:
            loss_refit = self.objective.loss(refit)
        else:  # most likely Newton's method begins here
            loss_refit, gradient = self.objective.loss_and_gradient(refit)
        if not loss_refit < loss:
            return start, loss, None
        return replace(start, weight=refit, name="least squares"), loss_refit, gradient

    def _on_all_samples(self, weight: Tensor, known: tuple[float, Tensor] | None) -> Newton:
        """Gradient and line search on all samples, products on some."""
        inputs = [int(part.flatten(1).sum(1).max()) for part in self.unpack(self.mask)]
        samples = samples_in_products(self.recipe, inputs)
        if samples is not None:
            wanted = min(samples, self.objective.samples)
            samples = self.memory.fitting_samples(wanted, self._linearized_bytes(), self.problem.sizes[0])
        narrow = self.problem if samples is None else self.problem.narrowed(samples)
        sampled = narrow.objective(self.recipe.normalization, self.objective.precision)
        begin = self.turn.sweep * self.recipe.newton_steps
        subsets = _rotating_subsets(narrow.sizes[: len(sampled.chosen)], samples, begin)
        systems = lambda at, step: self._system(sampled.subset(subsets(step)), at)  # noqa: E731
        return newton(self.objective, systems, weight, self.mask, self._options(), known)

    def _on_minibatches(self, weight: Tensor, loss: float, samples: int) -> Newton:
        """Algorithm 2 as written: gradient, line search and products on one mini-batch after another."""
        steps = cg_steps = negative = 0
        for part in _consecutive(self.problem.sizes[: len(self.objective.chosen)], samples):
            batch = self.objective.subset(part)
            systems = lambda at, _, batch=batch: self._system(batch, at)  # noqa: E731
            solved = newton(batch, systems, weight, self.mask, self._options())
            weight = solved.weight
            steps, cg_steps = steps + solved.steps, cg_steps + solved.cg_steps
            negative += solved.negative_curvature
        final = self.objective.loss(weight)
        return Newton(weight, loss, final, steps, cg_steps, NewtonOutcome.STEPS_DONE, negative)

    def _linearized_bytes(self) -> int:
        """Of one sample."""
        return linearized_bytes(self.segment.cost, self.kind, self.objective.precision or self.masked.dtype)

    def _system(self, curvature: Objective, at: Tensor) -> System:
        """Newton's system on kept weights, with the row blocks as preconditioner."""
        keep = self._linearized_bytes() * curvature.samples <= self.memory.products
        product = restrict(curvature.product(self.kind, at, keep), self.mask)
        if self.recipe.preconditioner is None or not self.blocks:
            return System(product)
        coins = torch.randint(0, 2, self.mask.shape, generator=self.turn.generator(), dtype=torch.int8)
        probe = (2 * coins.to(self.mask.device).to(at.dtype) - 1) * self.mask
        # rows of query and key matter less than those of value by far
        alike = self.segment.is_matched_itself
        rows = RowPreconditioner(self.blocks, self.unpack(probe), self.unpack(product(probe)), alike)
        return System(product, rows.mean_diagonal, lambda residual: self.pack(rows(self.unpack(residual))))

    def _options(self) -> NewtonOptions:
        recipe = self.recipe
        assert isinstance(recipe.cg_absolute_tolerance, float)  # resolved by the plan
        cg = CGOptions(
            recipe.cg_steps, recipe.cg_absolute_tolerance, recipe.cg_relative_tolerance, recipe.cg_least_gain
        )
        return NewtonOptions(recipe.newton_steps, cg, recipe.damping, recipe.relative_damping, recipe.armijo)


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
