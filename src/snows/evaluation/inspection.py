"""What a run would do: each layer, whether it takes the pattern, its horizon, and estimates of memory and time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..caller import own_surroundings
from ..data.preparation import limits_for, prepare
from ..data.samples import check_count
from ..data.usable import require_module
from ..devices.device import device_of
from ..devices.distributed.ranks import Ranks
from ..devices.memory import as_bytes
from ..devices.weights import where_they_rest
from ..errors import one_line
from ..graph import Layer
from ..graph.flops import FlopCount, network_flops
from ..patterns import PatternRules
from ..plan import Names, Plan, make_plan
from ..recipe import Effort, Recipe, as_recipe
from ..solve.duration import Duration
from ..solve.estimate import Estimate
from ..solve.footprint import micro_batch_size
from ..solve.layer import curvature_kind
from ..solve.settings import resolve
from ..solve.speed import measured_speed
from ..words import counted
from ..words import duration as in_words


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
        weights_at_rest: Bytes of the weights, if they do not fit the memory of the run: they rest outside of the
            device. 0: all are on the device.
        room_bytes: The part of the memory that is then for copies of weights.

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
    weights_at_rest: int = 0
    room_bytes: int = 0

    def __repr__(self) -> str:
        pruned = sum(layer.pattern is not None for layer in self.layers)
        return (
            f"<Inspection: {one_line(self.model)}, {counted(pruned, 'layer')} to prune, "
            f"{len(self.layers) - pruned} left dense; about {in_words(self.seconds)} and "
            f"{self.memory_bytes / 2**30:.1f} GiB with {self.samples} samples>"
        )

    @property
    def seconds(self) -> float:
        """Estimated time of the whole run on this device."""
        return sum(layer.seconds for layer in self.layers) + self.finish_seconds

    @property
    def memory_bytes(self) -> int:
        """Estimated peak beside the weights: the layer that needs most."""
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
    world_size: int = 1,
) -> Inspection:
    """Plan a run without doing it: what happens to each layer, and estimates of memory and time.

    Args:
        model, pattern, layers, exclude, horizon, recipe, effort, device, memory: As for `snows.prune`.
        calibration: As for `snows.prune`; a few samples are enough.
        samples: How many samples the run would use. Default: those of `calibration`.
        world_size: How many processes would share the samples; memory and time are then those of each. The time that
            they take to add up their sums is not counted.

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
    check_count("world_size", world_size)
    if samples is not None:
        check_count("samples", samples)
    chosen = as_recipe(recipe, effort)
    if horizon is not None:
        chosen = chosen.replace(horizon=horizon)
    rules = PatternRules.parse(pattern)
    require_module(model, "model")
    with own_surroundings(device_of(model, device)):
        limits = limits_for(model, device, budget)
        prepared = prepare(model, calibration, device, seed=0, room=limits.room)
        graph, count = prepared.graph, samples or prepared.samples.count
        settings = resolve(chosen, graph, prepared.device.type, rules)
        fitted = count * (2 if settings.mirror else 1)
        plan = make_plan(graph, rules, settings.horizon, layers, exclude)
        ranks = Ranks(size=world_size)
        micro = ranks.share(micro_batch_size(graph, plan, fitted, settings, prepared.device, limits, ranks))
        estimate = Estimate(graph, plan, settings, limits, prepared.device, ranks.share(fitted), micro, world_size)
        pruned = [planned.layer for planned in plan.pruned]
        inputs = partial(prepared.samples.rows, 0)
        speed = measured_speed(graph, pruned, inputs, prepared.samples.count, prepared.device)
        duration = Duration(estimate, speed, ranks.share(chosen.held_out_samples(count)))
        rows = _pruned_layers(duration, plan)
        rows += [_dense_layer(layer, reason) for layer, reason in plan.dense]
    weights = sum(p.numel() for p in model.parameters())
    kept = {planned.layer.parameter: 1 - planned.required_pattern.sparsity for planned in plan.pruned}
    return Inspection(
        model=type(model).__name__,
        samples=count,
        sweeps=settings.sweeps,
        layers=tuple(rows),
        network_weights=weights,
        flops=network_flops(graph).sparse(kept),
        finish_seconds=duration.last_stage,
        weights_at_rest=sum(w.nbytes for w in where_they_rest(graph.parameters).values()) if limits.room else 0,
        room_bytes=limits.room or 0,
    )


def _dense_layer(layer: Layer, reason: str) -> LayerInspection:
    flops = int(layer.node.meta["flops"]) if layer.in_graph else 0
    return LayerInspection(layer.name, tuple(layer.shape), None, reason, flops=flops)


def _pruned_layers(duration: Duration, plan: Plan) -> list[LayerInspection]:
    estimate, count = duration.estimate, len(plan.groups)
    groups = {planned.layer.parameter: group for group in plan.groups for planned in group}
    seconds = {group: sum(duration.layers[index::count]) / len(group) for index, group in enumerate(plan.groups)}
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
                seconds=seconds[group],
                flops=int(planned.layer.node.meta["flops"]),
            )
        )
    return rows
