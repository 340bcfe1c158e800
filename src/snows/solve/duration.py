"""How long a run will take, from the speed of its parts.

The numbers of passes are those of the code; the factors in front were fitted to runs on two CPU cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.fx import Node

from ..events import Listener, TimeEstimated
from ..graph import Segment
from ..plan import PlannedLayer
from ..recipe import Effort
from .estimate import Estimate
from .footprint import operations_kept
from .least_squares import USUAL_STEPS, takes_blocks
from .speed import Speed, assumed_speed, measured_speed

_LINEARIZE = 1.6  # forward passes that a linearization takes
_PUSH, _PULL = 1.0, 1.3  # of a linearized segment, in forward passes
_LINE_SEARCH = 1.5  # losses for each Newton step
_CG_STEPS, _CG_SHARE = 3, 0.5  # taken in any case, and of those that the recipe allows: many solves end earlier
_TRIAL_STEPS = 5  # of a shared factor between two looks at held-out samples
_EVALUATIONS = 11  # of the last stage
_BACKWARD = 2.0  # forward passes that a backward pass of the last stage takes


_ASSUMED_RATE = {"cpu": 2e10, "cuda": 1e13}  # operations per second, before anything is measured
_SHORT = 20.0  # seconds; a run that is shorter at the assumed rate is not measured
_LONG = 600.0  # seconds, from which on there is a hint at what would be quicker
_FEW_SAMPLES = 256


def announce_time(
    estimate: Estimate, samples: Callable[[int], list[Any]], held_out: int, effort: Effort, notify: Listener
) -> None:
    """Say how long the run will take, by a measurement of a second or two. A short run is not measured.

    Args:
        estimate: The run.
        samples: Gives the inputs of the graph for so many samples.
        held_out: How many of the run's samples are held out.
        effort: Of the recipe.
        notify: Gets the estimate.
    """
    graph, layers = estimate.graph, [planned.layer for planned in estimate.plan.pruned]
    rate = _ASSUMED_RATE.get(estimate.device.type, _ASSUMED_RATE["cuda"])
    if Duration(estimate, assumed_speed(graph, layers, rate), held_out).seconds < _SHORT:
        return
    speed = measured_speed(graph, layers, samples, estimate.samples - held_out, estimate.device)
    found = Duration(estimate, speed, held_out)
    notify(TimeEstimated(found.layers, found.last_stage, _quicker(found, effort) if found.seconds > _LONG else ()))


def _quicker(found: Duration, effort: Effort) -> tuple[str, ...]:
    settings, samples = found.estimate.settings, found.estimate.samples
    hints = {
        "effort 'fast'": effort != "fast",
        f"fewer than {samples} samples": samples > _FEW_SAMPLES,
        "horizon 0": settings.horizon > 0,
        "a recipe with finish_steps 0": found.last_stage > 0.25 * found.seconds,
    }
    return tuple(hint for hint, holds in hints.items() if holds)


@dataclass(frozen=True)
class Duration:
    """Seconds of a run.

    Attributes:
        estimate: The run.
        speed: Of its parts.
        held_out: How many of its samples are held out.
    """

    estimate: Estimate
    speed: Speed
    held_out: int = 0

    @property
    def seconds(self) -> float:
        return sum(self.layers) + self.last_stage

    @cached_property
    def layers(self) -> tuple[float, ...]:
        """Of each group of layers, in all sweeps."""
        settings = self.estimate.settings
        first = self._sweep(new_masks=True)
        return first * settings.mask_steps + self._sweep(new_masks=False) * (settings.sweeps - settings.mask_steps)

    @cached_property
    def last_stage(self) -> float:
        settings, samples = self.estimate.settings.distill, self.estimate.samples
        if not settings.steps:
            return 0.0
        forward = self.speed.of(self.estimate.graph.nodes)
        trained = settings.steps * min(settings.batch, samples) * (2 + _BACKWARD) * forward
        return trained + _EVALUATIONS * (self.held_out or samples) * 2 * forward

    @property
    def _fitted(self) -> int:
        return self.estimate.samples - self.held_out

    def _segment(self, group: tuple[PlannedLayer, ...]) -> Segment:
        return self.estimate.graph.segment([planned.layer for planned in group], group[0].horizon)

    @cached_property
    def _keeps_outputs(self) -> bool:
        """Whether the dense network runs once, for all sweeps."""
        e = self.estimate
        return bool(operations_kept(e.graph, e.plan, e.samples, e.settings, e.memory))

    def _sweep(self, new_masks: bool) -> tuple[float, ...]:
        position, found = 0, []
        for group in self.estimate.plan.groups:
            segment = self._segment(group)
            found.append(self._streams(position, segment.position) + self._solve(group, segment, new_masks))
            position = segment.position
        return tuple(found)

    def _streams(self, start: int, stop: int) -> float:
        """The streams move from one layer to the next, that of the dense network if targets are read from it."""
        nodes: Sequence[Node] = self.estimate.graph.nodes[start:stop]
        settings = self.estimate.settings
        passes = 1.0
        if settings.targets == "dense-stream":
            passes += 1 / settings.sweeps if self._keeps_outputs else 1
        return passes * self.estimate.samples * self.speed.of(nodes)

    def _solve(self, group: tuple[PlannedLayer, ...], segment: Segment, new_masks: bool) -> float:
        closed_form = self.estimate.settings.start.closed_form and new_masks
        body = self.speed.of(segment.body.nodes)
        targets = 0.0 if self._keeps_outputs else self.estimate.samples * body
        prelude = self.estimate.samples * self.speed.of(segment.prelude.nodes)
        compared = 3 * self.held_out * body
        total = targets + prelude + compared + self._row_systems(group, segment, closed_form)
        if not closed_form:
            return total + self._newton(group, body)
        looks = USUAL_STEPS / _TRIAL_STEPS * self.held_out * body if self._has_shared_factor(group, segment) else 0.0
        total += looks + self._fitted * body  # the loss of the masked weights
        if segment.is_one_layer:
            return total + self._fitted * body  # and of least squares, which is the solution
        return total + self._newton(group, body)

    def _row_systems(self, group: tuple[PlannedLayer, ...], segment: Segment, closed_form: bool) -> float:
        """Second moments and their factors. A preconditioner alone takes fewer samples."""
        settings = self.estimate.settings
        if not closed_form and not settings.curvature.preconditioned:
            return 0.0
        samples = self._fitted if closed_form else min(self._fitted, settings.curvature.samples)
        moments = samples * sum(self.speed.moments[planned.layer.parameter] for planned in group)
        return moments + sum(self._factors(planned, self._product_flops(group, segment)) for planned in group)

    def _product_flops(self, group: tuple[PlannedLayer, ...], segment: Segment) -> float:
        if not self.estimate.settings.curvature.preconditioned or segment.is_one_layer:
            return 0.0
        return 2.0 * segment.cost.flops * self.estimate.product_samples(group)

    def _has_shared_factor(self, group: tuple[PlannedLayer, ...], segment: Segment) -> bool:
        return not all(self._takes_blocks(planned, self._product_flops(group, segment)) for planned in group)

    def _takes_blocks(self, planned: PlannedLayer, product_flops: float) -> bool:
        rows, kept = planned.layer.shape[0], self.estimate.kept_inputs(planned)
        device = self.estimate.device.type
        size = 4.0 * rows * kept**2
        return takes_blocks(float(rows) * kept**3, size, self._shared_flops(planned), product_flops, device)

    def _shared_flops(self, planned: PlannedLayer) -> float:
        layer = planned.layer
        return float(layer.groups) * layer.columns**3 + USUAL_STEPS * 4 * float(layer.shape[0]) * layer.columns**2

    def _factors(self, planned: PlannedLayer, product_flops: float) -> float:
        if self._takes_blocks(planned, product_flops):
            return float(planned.layer.shape[0]) * self.estimate.kept_inputs(planned) ** 3 / self.speed.factors
        return self._shared_flops(planned) / self.speed.products

    def _newton(self, group: tuple[PlannedLayer, ...], body: float) -> float:
        settings = self.estimate.settings
        newton, samples = settings.newton, self._fitted
        products = self.estimate.product_samples(group)
        allowed = newton.cg.max_steps
        cg_steps = 1 + min(allowed, _CG_STEPS + _CG_SHARE * allowed)  # with the probe of the preconditioner
        gradient, product = _LINEARIZE + _PULL, _PUSH + _PULL
        step = samples * (gradient + _LINE_SEARCH) + products * (_LINEARIZE + cg_steps * product)
        if settings.in_minibatches:
            step = samples * (gradient + _LINE_SEARCH + _LINEARIZE + cg_steps * product)
        return newton.steps * step * body
