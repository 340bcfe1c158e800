"""`snows.sensitivity`: what pruning each layer alone does to the network, for several patterns."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..caller import Stoppable, own_surroundings, quiet_unless
from ..data.preparation import prepare
from ..data.samples import Samples, check_labels, check_seed
from ..data.usable import require_module
from ..devices.device import device_of
from ..devices.distributed.group import current_ranks, writes_files
from ..devices.memory import as_bytes, memory_limits
from ..devices.working_memory import working_within
from ..errors import ArgumentError, InputError, one_line, shown
from ..events import Working
from ..graph import Graph, Layer
from ..listeners.progress import Listeners, listening
from ..masks.trials import Effect, Trial, Trials, judged_samples
from ..patterns import Pattern, PatternRules, Unstructured, parse_pattern
from ..patterns.budgets import refits
from ..patterns.curves import KIND, SCHEMA, Curves
from ..plan import Names, as_names, make_plan
from ..results.files import write_or_rescue, write_whole
from ..results.folder import versions
from ..results.report import finite
from ..words import counted

PATTERNS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, "2:4", "1:4")
_JUDGED_SHARE = 4  # a quarter of the samples at most


@dataclass(frozen=True)
class Level:
    """One layer with one pattern.

    Attributes:
        pattern: As text.
        sparsity: The fraction removed from the layer.
        unstructured: Whether any weight could have been kept in place of any other.
        mask_only: What masking the layer by magnitude does.
        readjusted: The same with the kept weights re-adjusted: least squares on the layer's outputs, the K=0 solution.
    """

    pattern: str
    sparsity: float
    unstructured: bool
    mask_only: Effect
    readjusted: Effect


@dataclass(frozen=True)
class LayerSensitivity:
    """One layer, pruned alone.

    Attributes:
        name: The layer's module.
        parameter: The name of its weight.
        shape: Of the weight.
        weights: How many it has.
        levels: One for each pattern that the layer can take.
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    weights: int
    levels: tuple[Level, ...]

    def level(self, pattern: str) -> Level | None:
        return next((level for level in self.levels if level.pattern == pattern), None)


@dataclass(frozen=True)
class Sensitivity:
    """What pruning each layer alone does to the network, as `snows.sensitivity` returns it.

    Attributes:
        model: The name of its class.
        layers: In the order of execution.
        patterns: As text.
        samples: Calibration samples that weights were re-adjusted with.
        judged_samples: Other calibration samples, on which the effects were measured.
        dense_accuracy: Of the whole network on these; None without labels.
        versions: Of snows and torch.

    Example:
        >>> import snows, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
        >>> found = snows.sensitivity(model, torch.randn(64, 8), [0.5, 0.9], layers="*", progress=False)
        >>> [(layer.name, [level.pattern for level in layer.levels]) for layer in found.layers]
        [('0', ['0.5', '0.9']), ('2', ['0.5', '0.9'])]
        >>> half, most = found.layers[1].levels
        >>> half.readjusted.error < half.mask_only.error < most.mask_only.error
        True
        >>> result = snows.prune(model, torch.randn(64, 8), found.pattern(0.5), layers="*", progress=False)
        >>> result.report.sparsity
        0.5
    """

    model: str
    layers: tuple[LayerSensitivity, ...]
    patterns: tuple[str, ...]
    samples: int
    judged_samples: int
    dense_accuracy: float | None
    versions: dict[str, str]

    def __repr__(self) -> str:
        patterns = ", ".join(self.patterns)
        return f"<Sensitivity: {one_line(self.model)}, {counted(len(self.layers), 'layer')}, each to {patterns}>"

    def pattern(
        self,
        sparsity: float,
        of: Literal["weights", "flops"] = "weights",
        least: float = 0.0,
        most: float | None = None,
    ) -> Unstructured:
        """A sparsity that layers reach together, spread so that the errors measured here have the least sum."""
        return Unstructured(sparsity, "measured", of, least, most, Curves("sensitivity", self.to_json()))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data. Figures that are not finite are None."""
        data: dict[str, Any] = finite({"kind": KIND, "schema": SCHEMA, **dataclasses.asdict(self)})
        return data

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Write the file that patterns read: "0.7 measured=FILE"."""
        if writes_files():
            write_or_rescue(Path(path), self.to_json().encode())

    def to_html(self, path: str | Path) -> None:
        """Write the curves of all layers as a page for a browser."""
        from .charts import render

        if writes_files():
            write_whole(Path(path), render(self.to_dict()).encode())


def sensitivity(
    model: nn.Module,
    calibration: Any,
    patterns: Any = PATTERNS,
    *,
    layers: Names = None,
    exclude: Names = None,
    labels: Literal["model", "given"] = "model",
    device: torch.device | str | None = None,
    seed: int = 0,
    memory: int | str | None = None,
    progress: Listeners = True,
) -> Sensitivity:
    """Prune each layer alone to several patterns, and measure what that does to the network.

    Each layer is masked by magnitude, all others stay dense. The network's outputs are compared with the dense ones as
    the mask leaves them, and with the layer's kept weights re-adjusted (least squares on the layer's outputs). Three
    quarters of the samples or more serve to re-adjust, the others to measure. Inside a process group of
    torch.distributed every rank measures some of the layers, from all samples, and all of them return the same.

    Args:
        model, layers, exclude, device, seed, memory, progress: As for `snows.prune`.
        calibration: As for `snows.prune`. A few hundred samples are enough.
        patterns: One pattern or a list of them: sparsities and N:M. A layer is not measured with a pattern that it
            cannot take.
        labels: "given": the accuracy is measured, too, with the labels of the calibration batches.

    Returns:
        A `Sensitivity`: figures for every layer and pattern; `pattern` makes a budget of them, `save` a file.

    Raises:
        ArgumentError: An option is not understood.
        InputError: The samples do not fit the model, or no layer can be pruned.
        CaptureError: torch.export cannot capture the model.

    Example:
        >>> import snows, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
        >>> found = snows.sensitivity(model, torch.randn(64, 8), ["2:4"], layers="*", progress=False)
        >>> [layer.level("2:4").sparsity for layer in found.layers]
        [0.5, 0.5]
    """
    require_module(model, "model")
    check_labels(labels)
    check_seed(seed)
    tried = _tried(patterns)
    names = as_names(layers, "layers"), as_names(exclude, "exclude")
    budget, place, ranks = as_bytes(memory), device_of(model, device), current_ranks()
    shown = progress if ranks.is_first else False
    quiet = quiet_unless(ranks.is_first)
    with Stoppable(), quiet, listening(shown, "measuring") as notify, own_surroundings(place, notify):
        prepared = prepare(model, calibration, device, seed, labels == "given")
        graph = prepared.graph
        chosen = _layers_to_try(graph, tried, *names)
        limits = memory_limits(prepared.device, budget, ranks.on_this_host)
        fitted, judged = _split(graph, prepared.samples)
        trials = Trials(graph, chosen, fitted, judged, limits)
        prepared.compare_at_sizes(trials.at_once)
        owners = ranks.dealt([_cost(graph, layer, fitted.count, judged.count, len(tried)) for layer in trials.layers])
        own: dict[int, LayerSensitivity] = {}
        with working_within(limits.choosing):
            for number, trial in enumerate(trials):
                if owners[number] == ranks.rank:
                    notify(Working(trial.layer.name, len(own), owners.count(ranks.rank)))
                    own[number] = _measured(trial, tried)
        accuracy = trials.dense_accuracy
        found = {number: layer for layers in ranks.gathered(own) for number, layer in layers.items()}
    measured = tuple(found[number] for number in range(len(owners)))
    texts = tuple(str(pattern) for pattern in tried)
    return Sensitivity(type(model).__name__, measured, texts, fitted.count, judged.count, accuracy, versions())


def _cost(graph: Graph, layer: Layer, fitted: int, judged: int, patterns: int) -> float:
    """About how many operations the measurement of a layer takes: its second moment, then solves and passes."""
    columns, rows = layer.columns, layer.shape[0]
    rest = sum(int(node.meta["flops"]) for node in graph.nodes[layer.position :])
    solves = rows * (columns / 2) ** 3
    return fitted * layer.positions * columns**2 + patterns * (solves + 2 * judged * rest)


def _tried(patterns: Any) -> list[Pattern]:
    several = list(patterns) if isinstance(patterns, list | tuple) else [patterns]
    parsed = [parse_pattern(given) for given in several]
    found = {str(pattern): pattern for pattern in parsed if pattern is not None}
    if not found:
        raise ArgumentError(f"patterns is {shown(patterns)}; expected some, such as [0.5, 0.9, '2:4']")
    return list(found.values())


def _layers_to_try(graph: Graph, tried: Sequence[Pattern], layers: Names, exclude: Names) -> list[Layer]:
    """The chosen layers that take one of the patterns at least."""
    plan = make_plan(graph, PatternRules((("*", Unstructured(0.5)),)), 0, layers, exclude)
    plan.require_layers()
    found = [p.layer for p in plan.pruned if any(pattern.refusal(p.layer.shape) is None for pattern in tried)]
    if not found:
        raise InputError(f"none of the layers takes {', '.join(map(str, tried))}; try a sparsity such as 0.5")
    return found


def _split(graph: Graph, samples: Samples) -> tuple[Samples, Samples]:
    """Samples to re-adjust with, and others to measure on."""
    judged = judged_samples(graph, samples.count // _JUDGED_SHARE)
    if judged == 0:
        raise InputError(f"{samples.count} calibration samples are too few; expected at least {_JUDGED_SHARE}")
    return samples.split(samples.count - judged)


def _measured(trial: Trial, tried: Sequence[Pattern]) -> LayerSensitivity:
    layer = trial.layer
    taken = [pattern for pattern in tried if pattern.refusal(layer.shape) is None]
    masks = [pattern.best_mask(trial.weight.abs()) for pattern in taken]
    levels = [
        _level(trial, pattern, mask, refitted)
        for pattern, mask, refitted in zip(taken, masks, refits(trial.weight, trial.gram, masks), strict=True)
    ]
    return LayerSensitivity(layer.name, layer.parameter, tuple(layer.shape), trial.weight.numel(), tuple(levels))


def _level(trial: Trial, pattern: Pattern, mask: Tensor, refitted: Tensor) -> Level:
    removed = 1 - int(mask.sum()) / mask.numel()
    masked, readjusted = trial.effect(trial.weight * mask), trial.effect(refitted)
    return Level(str(pattern), removed, pattern.is_unstructured, masked, readjusted)
