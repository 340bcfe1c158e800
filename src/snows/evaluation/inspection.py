"""What a run would do: each layer, whether it takes the pattern, its horizon, and estimates of memory and time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..data.preparation import prepare
from ..devices.memory import Memory, as_bytes, memory_limits
from ..graph import Graph
from ..patterns.base import PatternRules
from ..plan import Names, Plan, make_plan
from ..recipe import Recipe, as_recipe
from ..solve.estimate import Estimate
from ..solve.footprint import micro_batch_size
from ..solve.layer import curvature_kind
from ..solve.settings import Settings, resolve

_TIMED_SAMPLES = 16


@dataclass(frozen=True)
class LayerInspection:
    name: str
    shape: tuple[int, ...]
    pattern: str | None  # None: the layer stays dense
    reason: str | None  # why
    horizon: int = 0
    curvature: str = ""
    memory_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Inspection:
    model: str
    samples: int
    sweeps: int
    layers: tuple[LayerInspection, ...]
    network_weights: int
    finish_seconds: float = 0.0  # of the last stage, where there is one

    @property
    def seconds(self) -> float:
        return sum(layer.seconds for layer in self.layers) + self.finish_seconds

    @property
    def memory_bytes(self) -> int:
        return max((layer.memory_bytes for layer in self.layers), default=0)


def inspect(
    model: nn.Module,
    calibration: Any,
    pattern: Any = "2:4",
    *,
    layers: Names = None,
    exclude: Names = None,
    horizon: int | None = None,
    recipe: Recipe | str = "default",
    samples: int | None = None,
    device: torch.device | str | None = None,
    memory: int | str | None = None,
) -> Inspection:
    """Plan a run without doing it. `samples`: how many the run would use; default: those given."""
    budget = as_bytes(memory)
    chosen = as_recipe(recipe)
    if horizon is not None:
        chosen = chosen.replace(horizon=horizon)
    rules = PatternRules.parse(pattern)
    world = prepare(model, calibration, device, seed=0)
    count = (samples or world.samples.count) * (2 if chosen.mirror else 1)
    settings = resolve(chosen, world.graph, world.device.type, rules)
    plan = make_plan(world.graph, rules, settings.horizon, layers, exclude)
    timed = min(_TIMED_SAMPLES, world.samples.count)
    speed = _flops_per_second(world.graph, world.samples.rows(0, timed), timed)
    limits = memory_limits(world.device, budget)
    found = _pruned(world.graph, plan, settings, count, world.device, speed, limits)
    found += [LayerInspection(layer.name, tuple(layer.shape), None, reason) for layer, reason in plan.dense]
    weights = sum(p.numel() for p in model.parameters())
    finish = _finish_seconds(world.graph, settings, count, speed)
    return Inspection(
        type(model).__name__, samples or world.samples.count, settings.sweeps, tuple(found), weights, finish
    )


def _pruned(
    graph: Graph, plan: Plan, settings: Settings, samples: int, device: torch.device, speed: float, limits: Memory
) -> list[LayerInspection]:
    micro = micro_batch_size(graph, plan, samples, settings, device, limits)
    rows = []
    estimate = Estimate(graph, plan, settings, limits, device, samples, micro)
    members = {p.layer.parameter: group for group in plan.groups for p in group}
    for planned in plan.pruned:
        layer, group = planned.layer, members[planned.layer.parameter]
        segment = graph.segment([other.layer for other in group], planned.horizon)
        products, newton = estimate.product_samples(group), settings.newton
        # Passes over the segment: targets, three losses, a gradient (3), and two for each product.
        work = samples * 7 + products * newton.steps * (2 * newton.cg.max_steps + 5)
        if settings.in_minibatches:
            work = samples * newton.steps * (4 * newton.cg.max_steps + 7)
        positions = graph.nodes[layer.position].meta["flops"] / (2 * layer.columns * layer.shape[0])
        gram = 2 * samples * positions * layer.columns**2 * layer.groups
        kind = curvature_kind(settings.curvature, segment)
        rows.append(
            LayerInspection(
                layer.name,
                tuple(layer.shape),
                str(planned.pattern),
                None,
                planned.horizon,
                kind,
                estimate.of_group(group),
                settings.sweeps * (work * segment.cost.flops / len(group) + gram) / speed,
            )
        )
    return rows


def _finish_seconds(graph: Graph, settings: Settings, samples: int, speed: float) -> float:
    """Each step is a pass of the dense network, one of the pruned network, and one back, which counts twice."""
    flops: int = sum(node.meta["flops"] for node in graph.nodes)
    return 4 * settings.distill.steps * min(settings.distill.batch, samples) * flops / speed


def _flops_per_second(graph: Graph, leaves: list[Any], samples: int) -> float:
    """Of this network on this device, from a few samples."""
    flops: int = sum(node.meta["flops"] for node in graph.nodes) * samples
    with torch.no_grad():
        graph.run(leaves)
        began = time.perf_counter()
        for output in graph.run(leaves):
            if isinstance(output, torch.Tensor):
                output.sum().item()  # waits for the device
    return flops / (time.perf_counter() - began)
