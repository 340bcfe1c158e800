"""What a report says first, and one line for each layer: for the page, for the terminal and for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..words import to_pattern
from .figures import amount, figure, measure_title, measured, memory, percent, time_taken

Data = Mapping[str, Any]


@dataclass(frozen=True)
class Card:
    """A figure of the headline: what it was in the dense network, what it is now, and a few words."""

    title: str
    value: str
    note: str
    before: str = ""


def cards(report: Data) -> list[Card]:
    rows, operations = report["evaluation"], report["operations"]
    found = [_quality(rows)] if rows else [_agreement(operations), _output_error(operations)]
    if report["finished"]:
        found += [_sparsity(report), _weights(report), _flops(report)]
    if report["seconds"]:
        found.append(Card("Time", time_taken(report["seconds"]), f"on {report['device']}{_peak(report)}"))
    return [card for card in found if card is not None]


def _peak(report: Data) -> str:
    """Of the accelerator, or on a CPU of the process, which its phases know."""
    peaks = [report["peak_memory_bytes"], *(phase["peak_bytes"] for phase in report["phases"])]
    known = [peak for peak in peaks if peak is not None]
    return f", {memory(max(known))} at the peak" if known else ""


def _quality(rows: list[Data]) -> Card | None:
    """The first figure of the evaluation: dense and pruned."""
    dense, pruned = rows[0], rows[-1]
    key = next((key for key in dense if key != "network" and pruned.get(key) is not None), None)
    if key is None:
        return None
    masked = next((row for row in rows if row.get("network") == "mask only"), None)
    note = "of the test samples" if masked is None else f"{measured(key, masked[key])} with the mask only"
    before = "" if dense.get(key) is None else measured(key, dense[key]).removesuffix(" %")
    title = measure_title(key)
    return Card(title[0].upper() + title[1:], measured(key, pruned[key]), note, before)


def _agreement(operations: Data | None) -> Card | None:
    """Without labels: the share of the samples with the dense network's top class, masked and at the end."""
    if operations is None or not operations["agreement"]:
        return None
    # The samples are few, so that a digit behind the point would mislead.
    shares = [f"{100 * share:.0f}" for share in operations["agreement"].values()]
    return _ends("Agreement", shares, f"same top class as dense, {operations['samples']} samples")


def _output_error(operations: Data | None) -> Card | None:
    """Without labels: the error of the network's output, with the mask only and at the end."""
    if operations is None:
        return None
    errors = [figure(100 * curve[-1]) for curve in operations["errors"].values()]
    return _ends("Output error", errors, "of the variance")


def _ends(name: str, values: list[str], note: str) -> Card:
    """The first of the values, which is that of the mask only, and the last."""
    if len(values) == 1:
        return Card(name, f"{values[0]} %", f"mask only, {note}")
    return Card(name, f"{values[-1]} %", f"mask only → re-adjusted, {note}", values[0])


def _sparsity(report: Data) -> Card:
    return Card(
        "Sparsity", percent(report["sparsity"]), f"of the pruned layers; {percent(report['network_sparsity'])} of all"
    )


def _weights(report: Data) -> Card:
    total = report["network_weights"]
    kept = total - sum(layer["weights"] - layer["kept"] for layer in report["layers"])
    return Card("Weights", amount(kept), "that are not zero", amount(total))


def _flops(report: Data) -> Card | None:
    flops = report["flops"]
    if not report["network_flops"]:
        return None
    note = f"for one sample, {figure(flops['reduction'])} times fewer"
    return Card("FLOPs", amount(flops["sparse"]), note, amount(flops["dense"]))


def began_in_closed_form(solve: Data) -> bool:
    """Whether the closed form is a result of its own: Newton's method went on from there."""
    return bool(solve["start"] == "least squares" and solve["newton_steps"])


def title(report: Data) -> str:
    pattern = report["pattern"]
    words = to_pattern(pattern)
    done = [words if pattern == "given" else f"pruned {words}"] if pattern else []
    if report["retraining"]:
        done.append("retrained")
    return f"{report['model'] or 'Model'} {' and '.join(done)}".strip()


def subtitle(report: Data) -> str:
    if not report["layers"]:
        return ""
    masks = "given masks" if report["mask"] == "given" else f"masks by {report['mask']}"
    return f"{masks} · {report['samples']:,} calibration samples · {len(report['layers'])} layers"


@dataclass(frozen=True)
class Row:
    """One layer in the table, and the sentence about it where it is opened. `outcome` is whole, `ended` short."""

    layer: Data
    masked: float | None
    readjusted: float | None
    loss: float | None
    held_out: float | None
    cg_steps: int
    seconds: float
    outcome: str
    ended: str
    facts: str
    advice: str


def rows(report: Data, advice: Mapping[int, str]) -> list[Row]:
    """One for each layer, with what to do about it where there is something."""
    return [_row(layer, advice.get(place, "")) for place, layer in enumerate(report["layers"])]


def _row(layer: Data, said: str) -> Row:
    solves = layer["solves"]
    first, last = (solves[0], solves[-1]) if solves else ({}, {})
    ended = outcome = last.get("outcome", "not solved yet")
    if last and last["kept"] != "solved":
        ended = f"{last['kept']} kept"
        outcome += f"; worse on held-out samples, so {last['kept']} was kept"
    return Row(
        layer, first.get("loss_masked"), first.get("loss"), last.get("loss"), last.get("held_out"),
        sum(solve["cg_steps"] for solve in solves), sum(solve["seconds"] for solve in solves), outcome, ended,
        _layer_facts(layer, outcome), said,
    )  # fmt: skip


def _layer_facts(layer: Data, outcome: str) -> str:
    shape = " × ".join(map(str, layer["shape"]))
    kept = (
        f"{layer['kept']:,} of " if layer["kept"] < layer["weights"] else ""
    )  # all of them until the run has finished
    words = f"{shape}, pattern {layer['pattern']}, {kept}{layer['weights']:,} weights{' kept' if kept else ''}."
    if len(layer["group"]) > 1:
        others = ", ".join(name for name in layer["group"] if name != layer["name"])
        words += f" Solved together with {others}."
    if layer["solves"]:
        words += f" {outcome[0].upper()}{outcome[1:]}."
    return words
