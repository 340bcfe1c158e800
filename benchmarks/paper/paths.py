"""How the loss of one layer falls, with Newton's method and with stochastic gradient descent.

Both start at the masked dense weights and see the same mini-batches. The clock stops while the loss of all samples is
computed, which is what the curves show.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from problems import layer_problem
from sections import Row
from torch import Tensor

from snows.data.preparation import prepare
from snows.patterns import NM, PatternRules
from snows.plan import make_plan
from snows.recipe import PAPER
from snows.solve.cg import CGOptions
from snows.solve.newton import NewtonOptions, System, newton
from snows.solve.objective import CurvatureKind, Objective, restrict
from snows.solve.problem import LayerProblem

from .setting import Setting

SAMPLES = 1000

_BETA, _LAMBDA, _TOLERANCE = PAPER.armijo, PAPER.damping, 1e-3  # of the paper's hyperparameter table


@dataclass
class Start:
    """The masked dense weights of a layer, and the loss to lower."""

    problem: LayerProblem
    weight: Tensor
    mask: Tensor
    objective: Objective

    @classmethod
    def of(cls, problem: LayerProblem, pattern: NM) -> Start:
        dense = problem.dense.parameters[problem.layers[0].parameter]
        mask = pattern.best_mask(dense.abs()).to(dense.device)
        return cls(problem, dense * mask, mask, problem.objective(PAPER.normalization, dense.dtype))

    def batches(self) -> Iterator[Objective]:
        """One mini-batch after another, for ever."""
        index = 0
        while True:
            yield self.objective.subset([index % len(self.objective.chosen)])
            index += 1


@dataclass
class Path:
    """The loss of all samples after each step, as a share of the loss at the start."""

    start: Start
    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    largest: list[list[float]] = field(default_factory=list)  # the two largest weights of the start
    _spent: float = 0.0
    _began: float = 0.0

    def __post_init__(self) -> None:
        self._two = self.start.weight.abs().flatten().topk(2).indices
        self._first = self.start.objective.loss(self.start.weight)
        self.note(self.start.weight, 0)

    def go(self) -> None:
        self._began = self._now()

    def note(self, weight: Tensor, step: int) -> None:
        if self._began:
            self._spent += self._now() - self._began
        origin = self.start.weight
        self.seconds.append(round(self._spent, 4))
        self.steps.append(step)
        self.losses.append(self.start.objective.loss(weight) / self._first)
        self.distances.append(float((weight - origin).square().sum() / origin.square().sum()))
        self.largest.append(weight.flatten()[self._two].tolist())
        self._began = self._now()

    def _now(self) -> float:
        if self.start.weight.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def row(self) -> Row:
        names = ("seconds", "steps", "losses", "distances", "largest")
        return {name: getattr(self, name) for name in names}


def newton_path(start: Start, kind: CurvatureKind, steps: int, cg_steps: int, seconds: float = 1e9) -> Path:
    """Algorithm 2: one Newton step for each mini-batch, until so many steps or seconds are spent."""
    path, weight = Path(start), start.weight
    options = NewtonOptions(1, CGOptions(cg_steps, _TOLERANCE), _LAMBDA, armijo=_BETA)
    path.go()
    for step, batch in zip(range(1, steps + 1), start.batches(), strict=False):

        def system(at: Tensor, _: int, batch: Objective = batch) -> System:
            return System(restrict(batch.product(kind, at, keep=True), start.mask))

        weight = newton(batch, system, weight, start.mask, options).weight
        path.note(weight, step)
        if path.seconds[-1] > seconds:
            break
    return path


def sgd_path(start: Start, steps: int, rate: float, every: int = 20) -> Path:
    path, weight = Path(start), start.weight
    path.go()
    for step, batch in zip(range(1, steps + 1), start.batches(), strict=False):
        weight = weight - rate * start.mask * batch.loss_and_gradient(weight)[1]
        if step % every == 0:
            path.note(weight, step)
            if not path.losses[-1] < 1e3:
                break  # diverged
    return path


def best_rate(start: Start, steps: int) -> float:
    """Gradient descent gets the rate that serves it best: each is tried for so many steps."""
    first = sgd_path(start, 1, 1.0, every=1)
    scale = 1.0
    while not sgd_path(start, 5, scale, every=5).losses[-1] < first.losses[0]:
        scale /= 4
    tried = {rate: sgd_path(start, steps, rate, every=steps).losses[-1] for rate in (4 * scale, scale, scale / 4)}
    finite = {rate: loss for rate, loss in tried.items() if loss == loss}
    return min(finite, key=lambda rate: finite[rate])


def surface(start: Start, paths: list[Path], points: int, samples: int) -> Row:
    """The loss along the two largest weights, all others as at the start, over the area that the paths cover."""
    visited = torch.tensor([point for path in paths for point in path.largest])
    low, high = visited.amin(0), visited.amax(0)
    margin = 0.3 * (high - low).clamp(min=1e-3)
    axes = [torch.linspace(float(a), float(b), points) for a, b in zip(low - margin, high + margin, strict=True)]
    two = start.weight.abs().flatten().topk(2).indices
    some = start.objective.subset(start.objective.chosen[: max(1, samples // start.problem.sizes[0])])
    first = some.loss(start.weight)
    losses = []
    for y in axes[1].tolist():
        row = []
        for x in axes[0].tolist():
            weight = start.weight.clone(memory_format=torch.contiguous_format)
            weight.view(-1)[two] = torch.tensor([x, y], dtype=weight.dtype, device=weight.device)
            row.append(some.loss(weight) / first)
        losses.append(row)
    return {"x": axes[0].tolist(), "y": axes[1].tolist(), "losses": losses}


def start_at(setting: Setting, network: str, layer: str | None, horizon: int, batch: int) -> Start:
    """A layer of a trained network at 2:4 (None: the first prunable one), on mini-batches of so many samples."""
    layer = layer or prunable_layers(setting, network, horizon)[0]
    x = setting.calibration(network, SAMPLES)
    piece = min(batch, len(x) // 2)
    return Start.of(layer_problem(setting.network(network), x, setting.device, layer, "2:4", horizon, piece), NM(2, 4))


def prunable_layers(setting: Setting, network: str, horizon: int) -> list[str]:
    """Those of the paper, in order: shortcuts stay dense."""
    graph = prepare(setting.network(network), setting.calibration(network, 4), setting.device, 0).graph
    plan = make_plan(graph, PatternRules.parse("2:4"), horizon, exclude="*downsample*")
    return [planned.layer.name for planned in plan.pruned]
