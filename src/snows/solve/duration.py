"""How long a run will take, from the speed of its parts.

The numbers of passes are those of the code; the factors in front were fitted to runs on two CPU cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.fx import Node

from ..graph import Segment
from ..plan import PlannedLayer
from .estimate import Estimate
from .footprint import operations_kept
from .least_squares import USUAL_STEPS, takes_blocks
from .speed import Speed

_LINEARIZE = 1.6  # forward passes that a linearization takes
_PUSH, _PULL = 1.0, 1.3  # of a linearized segment, in forward passes
_LINE_SEARCH = 1.5  # losses for each Newton step
_CG_SHARE = 0.8  # of the steps that the recipe allows
_TRIAL_STEPS = 5  # of a shared factor between two looks at held-out samples
_EVALUATIONS = 11  # of the last stage
_BACKWARD = 2.0  # forward passes that a backward pass of the last stage takes


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
        return self.estimate.settings.sweeps * sum(self.layers) + self.last_stage

    @cached_property
    def layers(self) -> tuple[float, ...]:
        """Of each group of layers, in one sweep."""
        position, found = 0, []
        for group in self.estimate.plan.groups:
            segment = self._segment(group)
            found.append(self._streams(position, segment.position) + self._solve(group, segment))
            position = segment.position
        return tuple(found)

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

    def _streams(self, start: int, stop: int) -> float:
        """Both streams move from one layer to the next."""
        nodes: Sequence[Node] = self.estimate.graph.nodes[start:stop]
        passes = 1 + (1 / self.estimate.settings.sweeps if self._keeps_outputs else 1)
        return passes * self.estimate.samples * self.speed.of(nodes)

    def _solve(self, group: tuple[PlannedLayer, ...], segment: Segment) -> float:
        settings = self.estimate.settings
        body = self.speed.of(segment.body.nodes)
        targets = 0.0 if self._keeps_outputs else self.estimate.samples * body
        prelude = self.estimate.samples * self.speed.of(segment.prelude.nodes)
        compared = 3 * self.held_out * body
        total = targets + prelude + compared + self._closed_form(group, segment, body)
        if segment.is_one_layer and settings.start.closed_form:
            return total + 2 * self._fitted * body  # losses of the masked and of the least-squares weights
        return total + self._newton(group, body)

    def _closed_form(self, group: tuple[PlannedLayer, ...], segment: Segment, body: float) -> float:
        settings = self.estimate.settings
        if not settings.start.closed_form and not settings.curvature.preconditioned:
            return 0.0
        moments = self._fitted * sum(self.speed.moments[planned.layer.parameter] for planned in group)
        products = 0.0
        if settings.curvature.preconditioned and not segment.is_one_layer:
            products = 2.0 * segment.cost.flops * self.estimate.product_samples(group)
        return moments + sum(self._factors(planned, products, body) for planned in group)

    def _factors(self, planned: PlannedLayer, product_flops: float, body: float) -> float:
        layer, kept = planned.layer, self.estimate.kept_inputs(planned)
        rows, columns = layer.shape[0], layer.columns
        flops, device = float(rows) * kept**3, self.estimate.device.type
        shared = float(layer.groups) * columns**3 + USUAL_STEPS * 4 * float(rows) * columns**2
        if takes_blocks(flops, 4.0 * rows * kept**2, shared, product_flops, device):
            return flops / self.speed.factors
        looks = USUAL_STEPS / _TRIAL_STEPS * self.held_out * body
        return shared / self.speed.products + looks

    def _newton(self, group: tuple[PlannedLayer, ...], body: float) -> float:
        settings = self.estimate.settings
        newton, samples = settings.newton, self._fitted
        products = self.estimate.product_samples(group)
        cg_steps = 1 + _CG_SHARE * newton.cg.max_steps  # with the probe of the preconditioner
        gradient, product = _LINEARIZE + _PULL, _PUSH + _PULL
        step = samples * (gradient + _LINE_SEARCH) + products * (_LINEARIZE + cg_steps * product)
        if settings.in_minibatches:
            step = samples * (gradient + _LINE_SEARCH + _LINEARIZE + cg_steps * product)
        return (newton.steps * step + samples) * body
