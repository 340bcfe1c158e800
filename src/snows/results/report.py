"""The report of a run: plain data, and the ways to show it."""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..events import *
from ..events import DenseLayer, Event, SolveReport

SCHEMA = 1


@dataclass(frozen=True)
class FinishReport:
    """The last stage, all layers together. Losses are of held-out samples, where there are some."""

    steps: int
    loss_before: float
    loss: float  # of the weights that were kept
    seconds: float


@dataclass
class LayerReport:
    name: str
    parameter: str
    shape: list[int]
    pattern: str
    weights: int
    kept: int
    horizon: int | None  # None: mask only
    group: list[str] = field(default_factory=list)  # the layers it was solved together with, itself among them
    solves: list[SolveReport] = field(default_factory=list)

    @property
    def sparsity(self) -> float:
        return 1 - self.kept / self.weights


@dataclass
class Report:
    model: str
    pattern: str = ""
    mask: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    permutation: dict[str, float] | None = None  # share of the magnitude that N:M masks keep, before and after it
    samples: int = 0
    held_out_samples: int = 0  # of these
    seed: int = 0
    device: str = ""
    layers: list[LayerReport] = field(default_factory=list)
    dense_layers: list[DenseLayer] = field(default_factory=list)
    finish: FinishReport | None = None
    network_weights: int = 0  # all weights of the model, biases and norms included
    seconds: float = 0.0  # of this call
    recalled_solves: int = 0  # of an earlier call, which `resume` found: they took none of these seconds
    peak_memory_bytes: int | None = None  # of the accelerator; not measured on a CPU
    expected_memory_bytes: int | None = None  # what the peak was estimated to be, before the run
    warnings: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    evaluation: list[dict[str, Any]] = field(default_factory=list)
    schema: int = SCHEMA

    @property
    def sparsity(self) -> float:
        """Of the selected layers."""
        return 1 - sum(layer.kept for layer in self.layers) / sum(layer.weights for layer in self.layers)

    @property
    def network_sparsity(self) -> float:
        """Of the whole network."""
        return sum(layer.weights - layer.kept for layer in self.layers) / self.network_weights

    @property
    def events(self) -> dict[str, int]:
        """How often what happened in solves: how they ended, and what had to be survived on the way."""
        solves = [s for layer in self.layers if layer.name == layer.group[0] for s in layer.solves]  # of groups: once
        ridge = float(self.recipe.get("ridge", 0.0))
        counts = Counter(solve.outcome for solve in solves)
        worse = Counter(
            "part of the way" if "of the way" in solve.kept else "the start" for solve in solves if solve.worse
        )
        counts.update({f"worse on held-out samples; {kept} was kept": count for kept, count in worse.items()})
        counts["negative curvature in CG"] = sum(solve.negative_curvature for solve in solves)
        counts["singular statistics, damped more"] = sum(solve.relative_damping > ridge for solve in solves)
        return {event: count for event, count in counts.items() if count}

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        for entry, layer in zip(data["layers"], self.layers, strict=True):
            entry["sparsity"] = layer.sparsity
        figures = {"sparsity": self.sparsity, "network_sparsity": self.network_sparsity, "events": self.events}
        whole = {**data, **figures}
        return {key: finite(value) for key, value in whole.items()}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_html(self, path: str | Path) -> None:
        Path(path).write_text(_html(self), encoding="utf-8")


def fold(events: Iterable[Event]) -> Report:
    report = Report("")
    by_name: dict[str, LayerReport] = {}
    for event in events:
        if isinstance(event, RunStarted):
            report.model, report.pattern, report.mask, report.recipe = (
                event.model,
                event.pattern,
                event.mask,
                dict(event.recipe),
            )
            report.samples, report.held_out_samples, report.seed = event.samples, event.held_out_samples, event.seed
            report.device, report.network_weights, report.versions = (
                event.device,
                event.network_weights,
                dict(event.versions),
            )
            for f in event.layers:
                by_name[f.name] = LayerReport(
                    f.name, f.parameter, list(f.shape), f.pattern, math.prod(f.shape), 0, f.horizon, list(f.group)
                )
            report.layers = list(by_name.values())
            report.dense_layers = list(event.dense_layers)
        elif isinstance(event, LayerSolved):
            for name in event.layers:
                by_name[name].solves.append(event.solve)
        elif isinstance(event, Warned):
            report.warnings += [event.message] if event.message not in report.warnings else []
        elif isinstance(event, MemoryEstimated):
            report.expected_memory_bytes = event.peak_bytes
        elif isinstance(event, ChannelsPermuted):
            report.permutation = {"kept_before": event.kept_before, "kept_after": event.kept_after}
        elif isinstance(event, Distilled):
            report.finish = FinishReport(event.steps, event.loss_before, event.loss, event.seconds)
        elif isinstance(event, RunFinished):
            for layer in report.layers:
                layer.kept = event.kept[layer.parameter]
            report.seconds, report.recalled_solves, report.peak_memory_bytes = (
                event.seconds,
                event.recalled_solves,
                event.peak_memory_bytes,
            )
    return report


def finite(data: Any) -> Any:
    """The same data with None for what JSON cannot say: NaN and infinity."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _html(report: Report) -> str:
    def table(title: str, header: list[str], rows: list[list[object]]) -> str:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in rows)
        return f"<h2>{html.escape(title)}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    facts: list[list[object]] = [
        ["model", report.model],
        ["pattern", report.pattern],
        ["mask", report.mask],
        ["sparsity of the pruned layers", f"{report.sparsity:.4f}"],
        ["sparsity of the whole network", f"{report.network_sparsity:.4f}"],
        ["calibration samples", report.samples],
        ["device", report.device],
        ["seconds", f"{report.seconds:.1f}"],
    ]
    if report.recalled_solves:
        facts.append(["solves of an earlier call, not in these seconds", report.recalled_solves])
    if report.finish is not None:
        losses = f"{report.finish.loss_before:.4g} -> {report.finish.loss:.4g}"
        facts.append(["last stage, loss of held-out samples", f"{losses} in {report.finish.steps} steps"])
    if report.permutation:
        facts.insert(3, ["magnitude kept, before and after permuting", _gain(report.permutation)])
    layers: list[list[object]] = [
        [
            layer.name, "x".join(map(str, layer.shape)), layer.pattern, f"{layer.sparsity:.4f}", _short(layer.horizon),
            _short(layer.solves[0].loss_masked if layer.solves else None),
            _short(layer.solves[-1].loss if layer.solves else None),
            sum(s.cg_steps for s in layer.solves), layer.solves[-1].outcome if layer.solves else "",
        ]
        for layer in report.layers
    ]  # fmt: skip
    parts = [table("Run", ["what", "value"], facts)]
    if report.evaluation:
        header = list(report.evaluation[0])
        parts.append(
            table("Evaluation", header, [[_short(row.get(key)) for key in header] for row in report.evaluation])
        )
    columns = ["layer", "shape", "pattern", "sparsity", "K", "loss, masked", "loss, re-adjusted", "CG steps", "ended"]
    parts.append(table("Pruned layers", columns, layers))
    if report.dense_layers:
        rows: list[list[object]] = [[d.name, "x".join(map(str, d.shape)), d.reason] for d in report.dense_layers]
        parts.append(table("Layers left dense", ["layer", "shape", "reason"], rows))
    if report.events:
        parts.append(table("How solves ended", ["what", "times"], [[what, n] for what, n in report.events.items()]))
    if report.warnings:
        parts.append(table("Warnings", ["warning"], [[warning] for warning in report.warnings]))
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#222;"
        "background:#fff}table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .75rem;text-align:left;"
        "border-bottom:1px solid #ddd}th{background:#f4f6f8}"
    )
    title = html.escape(f"snows: {report.model}, {report.pattern}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{title}</title><style>{style}</style></head><body><h1>{title}</h1>{''.join(parts)}</body></html>"
    )


def _gain(permutation: dict[str, float]) -> str:
    return " -> ".join(f"{permutation[key]:.4f}" for key in ("kept_before", "kept_after"))


def _short(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
