"""The report of a run: the fold of its events, as plain data."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ..events import (
    ChannelsPermuted,
    DenseLayer,
    Distilled,
    EpochEnded,
    Event,
    LayerFacts,
    LayerSolved,
    MemoryEstimated,
    OperationErrors,
    Phase,
    Retrained,
    RetrainingStarted,
    RunFinished,
    RunStarted,
    SolveReport,
    Warned,
    WeightFacts,
    WeightsShown,
)
from ..graph.flops import FlopCount
from .files import write_whole
from .html import render
from .plot import plot
from .retraining import Retraining
from .summary import as_html, as_text, one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = 1


@dataclass
class LayerReport:
    """One pruned layer.

    Attributes:
        name: The layer's module.
        parameter: The name of its weight.
        shape: Of the weight.
        pattern: As text; "given" if the mask was given.
        weights: How many it has.
        kept: How many of them are kept. All, until the run has finished.
        flops: Operations of the dense layer for one sample; 0 in reports of versions that did not count them.
        horizon: The K of its problem; None for the mask only.
        group: The names of the layers it was solved together with, itself among them.
        solves: How it was solved, sweep by sweep.
        picture: Histograms of its weights before and after, and a picture of its mask. None until the run has finished.
        sparsity: The fraction removed.
    """

    name: str
    parameter: str
    shape: list[int]
    pattern: str
    weights: int
    kept: int
    horizon: int | None
    group: list[str] = field(default_factory=list)
    solves: list[SolveReport] = field(default_factory=list)
    flops: int = 0
    picture: WeightFacts | None = None

    @property
    def sparsity(self) -> float:
        return 1 - self.kept / self.weights


@dataclass(repr=False)
class Report:
    """How a model was pruned.

    Attributes:
        model: The name of its class.
        pattern: As text; "given" if masks were given.
        mask: The mask method; "given" if masks were given.
        recipe: The choices of the run, by name.
        permutation: With `permute`, the share of the magnitude that the best N:M masks keep: `kept_before` and
            `kept_after`.
        samples: Number of calibration samples.
        held_out_samples: How many of them were held out, to judge weights by.
        seed: Of samples and random probes.
        device: Where the run worked.
        layers: The pruned layers, in the order of execution.
        dense_layers: The layers that stayed dense, with the reason.
        finish: The last stage, in which all layers are trained together; None if there was none.
        retraining: What `snows.retrain` did afterwards, epoch by epoch; None if nothing.
        network_weights: Number of weights of the whole model, biases and norms included.
        network_flops: Operations of the dense network for one sample.
        attention_flops: Of these, products of two activations.
        seconds: How many the call took.
        recalled_solves: How many solves an earlier, interrupted call had finished. Their time is not in `seconds`.
        peak_memory_bytes: Of the accelerator; None on a CPU.
        expected_memory_bytes: The estimate of that peak before the run.
        warnings: What the user was warned of, each once, with the number of times if it came again.
        versions: Of snows and torch.
        evaluation: Figures of several networks, one dictionary each. The command line adds them.
        schema: The version of `to_dict`.
        operations: The error of every operation in the pruned network, beside the mask only. None if not measured.
        phases: Seconds and the peak of memory of each part of the run.
        finished: Whether the run has ended. If not, the report holds what has happened so far.
        sparsity: The fraction removed from the pruned layers.
        network_sparsity: The fraction removed from the whole network.
        flops: Operations for one sample: `dense`, `sparse`, `attention` and the `reduction`.
        solve_outcomes: How solves ended and what happened on the way, with the number of times.

    Example:
        >>> import torch, snows
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> report = snows.prune(model, torch.randn(64, 8), "2:4", layers="0", progress=False).report
        >>> [(layer.name, layer.kept, layer.weights) for layer in report.layers]
        [('0', 32, 64)]
        >>> report.layers[0].sparsity
        0.5
        >>> report.warnings
        []
    """

    model: str = ""
    pattern: str = ""
    mask: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    permutation: dict[str, float] | None = None
    samples: int = 0
    held_out_samples: int = 0
    seed: int = 0
    device: str = ""
    layers: list[LayerReport] = field(default_factory=list)
    dense_layers: list[DenseLayer] = field(default_factory=list)
    finish: Distilled | None = None
    retraining: Retraining | None = None
    network_weights: int = 0
    network_flops: int = 0
    attention_flops: int = 0
    seconds: float = 0.0
    recalled_solves: int = 0
    peak_memory_bytes: int | None = None
    expected_memory_bytes: int | None = None
    warnings: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    evaluation: list[dict[str, Any]] = field(default_factory=list)
    operations: OperationErrors | None = None
    phases: list[Phase] = field(default_factory=list)
    schema: int = SCHEMA
    finished: bool = False

    @property
    def sparsity(self) -> float:
        if not self.layers:
            return 0.0
        return 1 - sum(layer.kept for layer in self.layers) / sum(layer.weights for layer in self.layers)

    @property
    def network_sparsity(self) -> float:
        if not self.layers:
            return 0.0
        return sum(layer.weights - layer.kept for layer in self.layers) / self.network_weights

    @property
    def flops(self) -> FlopCount:
        saved = sum(layer.flops * layer.sparsity for layer in self.layers)
        return FlopCount(self.network_flops, self.network_flops - round(saved), self.attention_flops)

    @property
    def solve_outcomes(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        ridge = float(self.recipe.get("ridge", 0.0))
        heads = [layer for layer in self.layers if layer.group[:1] in ([], [layer.name])]  # each group counts once
        solves = [solve for layer in heads for solve in layer.solves]
        counts.update(solve.outcome for solve in solves)
        for solve in solves:
            if solve.worse:
                kept = "part of the way" if "of the way" in solve.kept else "the start"
                counts[f"worse on held-out samples; {kept} was kept"] += 1
        counts["negative curvature in CG"] = sum(solve.negative_curvature for solve in solves)
        counts["singular statistics, damped more"] = sum(solve.relative_damping > ridge for solve in solves)
        return {outcome: count for outcome, count in counts.items() if count}

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data for JSON. Figures that are not finite are None."""
        data = dataclasses.asdict(self)
        for entry, layer in zip(data["layers"], self.layers, strict=True):
            entry["sparsity"] = layer.sparsity
        if self.retraining is not None:
            chosen = {"best_epoch": self.retraining.best_epoch, "recalled_epochs": self.retraining.recalled_epochs}
            data["retraining"] |= chosen
        data |= {
            "sparsity": self.sparsity,
            "network_sparsity": self.network_sparsity,
            "flops": self.flops.to_dict(),
            "events": self.solve_outcomes,
        }
        return {key: finite(value) for key, value in data.items()}

    def to_json(self) -> str:
        """The report as strict JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __repr__(self) -> str:
        return f"<Report: {one_line(self.to_dict())}>"

    def _repr_html_(self) -> str:
        return as_html(self.to_dict())

    def summary(self) -> str:
        """The headline, a table of the layers, and which of them to look at, as text."""
        return as_text(self.to_dict())

    def plot(self) -> Figure:
        """Losses of every layer and errors of every operation, drawn by matplotlib: `report.plot().savefig("run.png")`.

        Returns:
            A figure of matplotlib. A notebook shows it.

        Raises:
            InputError: matplotlib is not installed.
        """
        return plot(self.to_dict())

    def beside(self, name: str, other: Report) -> Report:
        """This report with the errors of another run's operations as one more curve, which gets this name.

        Both runs must have the same model, samples and seed, so that the same was measured:
        `result.report.beside("layer-wise (K=0)", light.report)`.

        Raises:
            ArgumentError: The reports do not have the same operations, on as many samples.
        """
        mine, others = self.operations, other.operations
        if mine is None or others is None or (mine.names, mine.samples) != (others.names, others.samples):
            raise ArgumentError("the reports do not have errors of the same operations, on as many samples")
        (masked, errors), *rest = mine.errors.items()
        curves = {masked: errors, name: list(others.errors.values())[-1], **dict(rest)}
        return dataclasses.replace(self, operations=dataclasses.replace(mine, errors=curves))

    def to_html(self, path: str | Path, refresh: float | None = None) -> None:
        """Write the report as a page for a browser.

        The page of a run that has not finished says so. The file appears whole, so that a browser may read it at any
        time.

        Args:
            path: The file.
            refresh: Seconds after which a browser reads the file again, while the run has not finished. None: never.
        """
        write_whole(Path(path), render(self.to_dict(), refresh).encode())


def finite(data: Any) -> Any:
    """The same data with None for what JSON cannot say: NaN and infinity."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def fold(events: Iterable[Event], report: Report | None = None) -> Report:
    """The report of a run from its events; without the last ones it is unfinished.

    A run that goes on from an earlier one (retraining) adds to its `report`, which stays as it is.
    """
    folded = Report() if report is None else copy.deepcopy(report)
    for event in events:
        add(event, folded)
    return folded


def add(event: Event, report: Report) -> bool:
    """Add what an event says; whether it says anything to a report. Steps do not, nor do unknown events."""
    adding = _ADDING.get(type(event))
    if adding is not None:
        adding(event, report)
    return adding is not None


def _warn(event: Warned, report: Report) -> None:
    """Each message once; one that came again with the number of times."""
    if event.times > 1 and event.message in report.warnings:
        report.warnings[report.warnings.index(event.message)] = f"{event.message} ({event.times} times)"
    elif event.message not in report.warnings:
        report.warnings.append(event.message)


def _start(event: RunStarted, report: Report) -> None:
    report.model, report.pattern, report.mask = event.model, event.pattern, event.mask
    report.recipe, report.versions = dict(event.recipe), dict(event.versions)
    report.samples, report.held_out_samples = event.samples, event.held_out_samples
    report.seed, report.device = event.seed, event.device
    report.layers = [_layer_report(facts) for facts in event.layers]
    report.dense_layers = list(event.dense_layers)
    report.network_weights = event.network_weights
    report.network_flops, report.attention_flops = event.flops, event.attention_flops


def _layer_report(facts: LayerFacts) -> LayerReport:
    weights = math.prod(facts.shape)
    return LayerReport(
        name=facts.name,
        parameter=facts.parameter,
        shape=list(facts.shape),
        pattern=facts.pattern,
        weights=weights,
        kept=weights,
        horizon=facts.horizon,
        group=list(facts.group),
        flops=facts.flops,
    )


def _finish(event: RunFinished, report: Report) -> None:
    for layer in report.layers:
        layer.kept = event.kept.get(layer.parameter, layer.weights)
    report.finished, report.phases = True, list(event.phases)
    report.seconds, report.recalled_solves = event.seconds, event.recalled_solves
    report.peak_memory_bytes = event.peak_memory_bytes


def _solve(event: LayerSolved, report: Report) -> None:
    for layer in report.layers:
        if layer.name in event.layers:
            layer.solves.append(event.solve)


def _expect_memory(event: MemoryEstimated, report: Report) -> None:
    report.expected_memory_bytes = event.peak_bytes


def _permute(event: ChannelsPermuted, report: Report) -> None:
    report.permutation = dataclasses.asdict(event)


def _distill(event: Distilled, report: Report) -> None:
    report.finish = event


def _compare(event: OperationErrors, report: Report) -> None:
    report.operations = event


def _show_weights(event: WeightsShown, report: Report) -> None:
    for layer in report.layers:
        layer.picture = event.weights.get(layer.parameter)


def _start_retraining(event: RetrainingStarted, report: Report) -> None:
    facts = dict(vars(event))
    report.model = facts.pop("model")
    report.retraining, report.evaluation = Retraining(**facts), []  # the figures are of the network before


def _end_epoch(event: EpochEnded, report: Report) -> None:
    if report.retraining is not None:
        report.retraining.history.append(event)


def _finish_retraining(event: Retrained, report: Report) -> None:
    if report.retraining is not None:
        report.retraining.seconds, report.retraining.finished = event.seconds, True


_ADDING: dict[type[Event], Callable[[Any, Report], None]] = {
    RunStarted: _start,
    Warned: _warn,
    MemoryEstimated: _expect_memory,
    ChannelsPermuted: _permute,
    LayerSolved: _solve,
    Distilled: _distill,
    OperationErrors: _compare,
    WeightsShown: _show_weights,
    RunFinished: _finish,
    RetrainingStarted: _start_retraining,
    EpochEnded: _end_epoch,
    Retrained: _finish_retraining,
}
