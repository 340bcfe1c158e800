"""How much of the device's memory a run will use, estimated before anything is run.

Its constants were measured. benchmarks/speed.py compares the estimate with the peak of every run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from ..devices.memory import FACTORING, Memory
from ..graph import Graph, Segment
from ..linalg.gram import CHUNK_BYTES
from ..plan import Plan, PlannedLayer
from . import distill, effects
from .footprint import GRADIENT, linearized_bytes, operations_kept
from .layer import curvature_kind, derivative_precision, samples_in_products
from .settings import ALL_SAMPLES, Settings

_DENSITY = 0.5  # assumed of a given mask


@dataclass(frozen=True)
class Estimate:
    """The memory of a run on `samples` samples, in pieces of `micro_batch` samples.

    Of several `ranks`, these are one rank's.
    """

    graph: Graph
    plan: Plan
    settings: Settings
    memory: Memory
    device: torch.device
    samples: int
    micro_batch: int
    ranks: int = 1

    def peak(self) -> int:
        """Bytes at the group that takes most."""
        return max((self.of_group(group) for group in self.plan.groups), default=0)

    def of_group(self, group: tuple[PlannedLayer, ...]) -> int:
        """Bytes while the group is solved: what is held throughout, and the largest of what takes turns."""
        segment = self.graph.segment([planned.layer for planned in group], group[0].horizon)
        cost, micro = segment.cost, min(self.micro_batch, self.samples)
        live = self.graph.live_bytes(min(planned.layer.position for planned in group))
        resident = self.memory.resident(live, self.samples)
        offloads = resident < self.samples
        held = 2 * live * (resident + micro * offloads) + self._operations_kept * self.samples
        targets = cost.prelude_bytes + cost.input_bytes * offloads + (0 if self._operations_kept else cost.output_bytes)
        keeps = targets * self.samples <= self.memory.targets(live, self.samples)
        held += targets * (self.samples if keeps else micro)
        factors, factoring = self._factors(group)
        return held + factors + max(factoring, int(GRADIENT * cost.bytes * micro), self._products(segment, group))

    def largest_pass(self, fitted: int) -> int:
        """Samples that go through the whole network at once, at most. `fitted` are those that weights are fitted to."""
        sizes = [self.micro_batch, effects.samples_at_once(self.graph, self.samples, self.memory)]
        if self.settings.distill.steps:
            sizes.append(distill.samples_at_once(self.graph, fitted, self.settings.distill, self.memory, self.device))
        return min(max(sizes), self.samples)

    def product_samples(self, group: tuple[PlannedLayer, ...]) -> int:
        """Samples in one curvature product of the group."""
        wanted = self.settings.minibatch
        if not self.settings.in_minibatches:
            wanted = samples_in_products(self.settings.curvature, [self.kept_inputs(planned) for planned in group])
        return min(math.ceil(wanted / self.ranks), self.samples)

    @cached_property
    def _operations_kept(self) -> int:
        """Bytes for one sample."""
        nodes = operations_kept(self.graph, self.plan, self.samples, self.settings, self.memory)
        return sum(int(node.meta["bytes"]) for node in nodes)

    def _products(self, segment: Segment, group: tuple[PlannedLayer, ...]) -> int:
        """Bytes of the Jacobians, and of the tangents of a product."""
        if segment.is_one_layer:
            return 0
        cost, dtype, curvature = segment.cost, torch.float32, self.settings.curvature
        precision = derivative_precision(curvature, segment, self.device, dtype)
        per_sample = linearized_bytes(cost, curvature_kind(curvature, segment), precision)
        samples = self.product_samples(group)
        if not self.settings.in_minibatches and curvature.samples < ALL_SAMPLES:
            samples = self.memory.fitting_samples(samples, per_sample, self.micro_batch)
        piece = min(samples, self.micro_batch)
        kept = samples if per_sample * samples <= self.memory.products else piece
        values = cost.output_bytes + cost.prelude_bytes + 3 * cost.largest_bytes
        tangents = values * precision.itemsize // dtype.itemsize
        return per_sample * kept + tangents * piece

    def _factors(self, group: tuple[PlannedLayer, ...]) -> tuple[int, int]:
        """Bytes of the row blocks on the device, and of the working memory that inverts them."""
        sizes = [(planned.layer.shape[0], self.kept_inputs(planned)) for planned in group]
        kept = [4 * rows * inputs**2 for rows, inputs in sizes]
        chunk = min(CHUNK_BYTES.get(self.device.type, CHUNK_BYTES["cpu"]), self.memory.chunk)
        made = max(min(8 * rows * inputs**2, max(chunk, 8 * inputs**2)) for rows, inputs in sizes)
        return sum(size for size in kept if size <= self.memory.factors), FACTORING * made

    def kept_inputs(self, planned: PlannedLayer) -> int:
        """Inputs that an output keeps in the first mask step, which keeps most."""
        first_step = 1 / self.settings.mask_steps
        sparsity = 1 - _DENSITY if planned.pattern is None else planned.pattern.on_the_way(first_step).sparsity
        return round((1 - sparsity) * planned.layer.columns)
