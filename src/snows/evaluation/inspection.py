"""What a run would do: each layer, whether it takes the pattern, its horizon, and estimates of memory and time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..data.preparation import prepare
from ..devices.memory import as_bytes, memory_limits
from ..graph import Graph, Layer, Segment
from ..graph.flops import FlopCount, network_flops
from ..patterns import PatternRules
from ..plan import Names, Plan, PlannedLayer, make_plan
from ..recipe import Effort, Recipe, as_recipe
from ..solve.estimate import Estimate
from ..solve.footprint import micro_batch_size
from ..solve.layer import curvature_kind
from ..solve.settings import Settings, resolve

_TIMED_SAMPLES = 16


@dataclass(frozen=True)
class LayerInspection:
    """One layer: how it would be pruned, or why it stays dense."""

    name: str
    shape: tuple[int, ...]
    pattern: str | None  # None: the layer stays dense
    reason: str | None  # why it stays dense
    horizon: int = 0
    curvature: str = ""
    memory_bytes: int = 0
    seconds: float = 0.0
    flops: int = 0  # of the dense layer, for one sample


@dataclass(frozen=True)
class Inspection:
    """The plan of a run, as `snows.inspect` returns it.

    Attributes:
        model: The model's class.
        samples: Calibration samples of the run.
        sweeps: Passes over all layers.
        layers: Every layer. Those that stay dense come last, each with its reason.
        network_weights: All weights of the model, biases and norms included.
        flops: Operations for one sample, `dense` and `sparse`, if every layer has the sparsity of its pattern.
        finish_seconds: Estimate for the last stage; 0 if there is none.

    Example:
        >>> import snows, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
        >>> found = snows.inspect(model, torch.randn(64, 8), "3:8", layers="*")
        >>> found.seconds > 0, found.memory_bytes > 0
        (True, True)
        >>> [layer.name for layer in found.layers if layer.pattern is None]
        []
    """

    model: str
    samples: int
    sweeps: int
    layers: tuple[LayerInspection, ...]
    network_weights: int
    flops: FlopCount
    finish_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Estimated time of the whole run on this device."""
        return sum(layer.seconds for layer in self.layers) + self.finish_seconds

    @property
    def memory_bytes(self) -> int:
        """Estimated peak: the layer that needs most."""
        return max((layer.memory_bytes for layer in self.layers), default=0)


def inspect(
    model: nn.Module,
    calibration: Any,
    pattern: Any = "2:4",
    *,
    layers: Names = None,
    exclude: Names = None,
    horizon: int | None = None,
    recipe: Recipe | str | None = None,
    effort: Effort = "default",
    samples: int | None = None,
    device: torch.device | str | None = None,
    memory: int | str | None = None,
) -> Inspection:
    """Plan a run without doing it: what happens to each layer, and estimates of memory and time.

    Args:
        model, pattern, layers, exclude, horizon, recipe, effort, device, memory: As for `snows.prune`.
        calibration: As for `snows.prune`; a few samples are enough.
        samples: How many samples the run would use. Default: those of `calibration`.

    Returns:
        A row for every layer, and the totals.

    Raises:
        ArgumentError: An option is not understood.
        InputError: The samples do not fit the model.
        CaptureError: torch.export cannot capture the model.

    Example:
        >>> import snows, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
        >>> found = snows.inspect(model, torch.randn(64, 8), "2:4", layers="0", samples=1000)
        >>> [(layer.name, layer.pattern, layer.reason) for layer in found.layers]
        [('0', '2:4', None), ('2', None, 'not among the chosen layers')]
    """
    budget = as_bytes(memory)
    chosen = as_recipe(recipe, effort)
    if horizon is not None:
        chosen = chosen.replace(horizon=horizon)
    rules = PatternRules.parse(pattern)
    prepared = prepare(model, calibration, device, seed=0)
    graph, shown = prepared.graph, samples or prepared.samples.count
    fitted = shown * (2 if chosen.mirror else 1)
    settings = resolve(chosen, graph, prepared.device.type, rules)
    plan = make_plan(graph, rules, settings.horizon, layers, exclude)
    timed = min(_TIMED_SAMPLES, prepared.samples.count)
    speed = _flops_per_second(graph, prepared.samples.rows(0, timed), timed)
    limits = memory_limits(prepared.device, budget)
    micro = micro_batch_size(graph, plan, fitted, settings, prepared.device, limits)
    estimate = Estimate(graph, plan, settings, limits, prepared.device, fitted, micro)
    rows = _pruned_layers(estimate, plan, speed)
    rows += [_dense_layer(layer, reason) for layer, reason in plan.dense]
    weights = sum(p.numel() for p in model.parameters())
    kept = {planned.layer.parameter: 1 - planned.required_pattern.sparsity for planned in plan.pruned}
    return Inspection(
        model=type(model).__name__,
        samples=shown,
        sweeps=settings.sweeps,
        layers=tuple(rows),
        network_weights=weights,
        flops=network_flops(graph).sparse(kept),
        finish_seconds=_finish_seconds(graph, settings, fitted, speed),
    )


def _dense_layer(layer: Layer, reason: str) -> LayerInspection:
    flops = int(layer.node.meta["flops"]) if layer.in_graph else 0
    return LayerInspection(layer.name, tuple(layer.shape), None, reason, flops=flops)


def _pruned_layers(estimate: Estimate, plan: Plan, speed: float) -> list[LayerInspection]:
    groups = {planned.layer.parameter: group for group in plan.groups for planned in group}
    rows = []
    for planned in plan.pruned:
        group = groups[planned.layer.parameter]
        segment = estimate.graph.segment([member.layer for member in group], planned.horizon)
        rows.append(
            LayerInspection(
                name=planned.layer.name,
                shape=tuple(planned.layer.shape),
                pattern=str(planned.pattern),
                reason=None,
                horizon=planned.horizon,
                curvature=curvature_kind(estimate.settings.curvature, segment),
                memory_bytes=estimate.of_group(group),
                seconds=_layer_flops(estimate, planned, group, segment) / speed,
                flops=int(planned.layer.node.meta["flops"]),
            )
        )
    return rows


def _layer_flops(estimate: Estimate, planned: PlannedLayer, group: tuple[PlannedLayer, ...], segment: Segment) -> float:
    """Of all sweeps: passes over the segment, shared by the group, and the layer's Gram matrix."""
    settings, samples, layer = estimate.settings, estimate.samples, planned.layer
    newton = settings.newton
    if settings.in_minibatches:
        passes = samples * newton.steps * (4 * newton.cg.max_steps + 7)
    else:  # targets, three losses, a gradient (3), and two for each product
        products = estimate.product_samples(group)
        passes = samples * 7 + products * newton.steps * (2 * newton.cg.max_steps + 5)
    positions: float = estimate.graph.nodes[layer.position].meta["flops"] / (2 * layer.columns * layer.shape[0])
    gram = 2 * samples * positions * layer.columns**2 * layer.groups
    return settings.sweeps * (passes * segment.cost.flops / len(group) + gram)


def _finish_seconds(graph: Graph, settings: Settings, samples: int, speed: float) -> float:
    """Each step runs the dense and the pruned network forward, and the pruned one backward, which counts twice."""
    flops: int = sum(node.meta["flops"] for node in graph.nodes)
    return 4 * settings.distill.steps * min(settings.distill.batch, samples) * flops / speed


def _flops_per_second(graph: Graph, inputs: list[Any], samples: int) -> float:
    """Of this network on this device, from a few samples."""
    flops: int = sum(node.meta["flops"] for node in graph.nodes) * samples
    with torch.no_grad():
        graph.run(inputs)
        began = time.perf_counter()
        for output in graph.run(inputs):
            if isinstance(output, torch.Tensor):
                output.sum().item()  # waits for the device
    return flops / (time.perf_counter() - began)
