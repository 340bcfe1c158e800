"""Timings as tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.table import Table

from ..graph.flops import FlopCount
from ..words import counted
from .tables import flops_line

if TYPE_CHECKING:
    from rich.console import Console

    from ..timing.benchmark import Benchmark, LayerBenchmark
    from ..timing.clock import Timing


def print_bench(found: Benchmark, console: Console) -> None:
    machine = found.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    where = machine["cpu"] if machine["device"] == "cpu" else f"{machine['device']}; {machine['cpu']}"
    console.print(f"{found.model} on {where}, {counted(machine['threads'], 'thread')}; {found.dtype}; {versions}")
    if any(layer.timings for layer in found.layers):
        console.print(_layers(found))
    if found.network:
        console.print(_network(found))
    for reason, layers in _by_reason(found.layers).items():
        console.print(f"  not sparse here: {_names(layers)}: {reason}")
    for engine, layers in _takers(found.layers).items():
        console.print(f"  {engine} can take {len(layers)} of {len(found.layers)} layers; not timed")
    for sentence, layers in _never(found.layers).items():
        console.print(f"  {_names(layers)}: {sentence}")
    if found.not_timed:
        console.print(f"  the time limit left out {len(found.not_timed)}: {_names(list(found.not_timed))}")
    if found.flops:
        count = FlopCount(*(int(found.flops[name]) for name in ("dense", "sparse", "attention")))
        console.print(f"{flops_line(count)}. That is no time; times are above.")
    for batch in found.batches:
        if best := found.fastest(batch):
            way = f"{best.engine}, {best.mode}, weights {best.weights}"
            console.print(f"Fastest whole network at batch {batch}: {way}")
    console.print(_advice(found))


def _advice(found: Benchmark) -> str:
    if not found.prune:
        timed = " that was timed" if found.not_timed else ""
        return f"No layer{timed} was faster sparse here: pruning makes this network smaller at most, not faster."
    return f"If speed is the goal, prune {len(found.prune)} of {len(found.layers)} layers: {', '.join(found.prune)}"


def _layers(found: Benchmark) -> Table:
    table = Table(title="layers: milliseconds, best dense and best sparse way: median (quartiles)")
    for title in ("layer", "shape", "zeros", "batch", "dense", "sparse", "speed-up"):
        table.add_column(title, justify="left" if title in ("layer", "shape") else "right", overflow="fold")
    for layer in found.layers:
        for batch in found.batches:
            best = layer.fastest(batch)
            if layer.timed_as is None and best is not None:
                dense, sparse = best
                alike = sum(other.timed_as == layer.name for other in found.layers)
                name = layer.name + (f" and {alike} alike" if alike else "")
                shape = "x".join(map(str, layer.shape))
                cells = (str(batch), _time(dense), _time(sparse), _ratio(dense, sparse))
                table.add_row(name, shape, f"{layer.sparsity:.0%}", *cells)
    return table


def _ratio(dense: Timing, sparse: Timing) -> str:
    """Times overlap where the machine was busy, or both are equally fast."""
    word = "faster" if sparse.below(dense) else "slower" if dense.below(sparse) else "unclear"
    return f"{dense.median / sparse.median:.2f}, {word}"


def _network(found: Benchmark) -> Table:
    table = Table(title="the whole network: milliseconds a batch: median (quartiles)")
    for title in ("engine", "mode", "weights", *(f"batch {batch}" for batch in found.batches)):
        table.add_column(title, justify="right" if title.startswith("batch") else "left", overflow="fold")
    rows: dict[tuple[str, str, str], dict[int, str]] = {}
    for entry in found.network:
        text = str(entry.reason) if entry.timing is None else _time(entry.timing)
        rows.setdefault((entry.engine, entry.mode, entry.weights), {})[entry.batch] = text
    for names, cells in rows.items():
        table.add_row(*names, *(cells.get(batch, "–") for batch in found.batches))
    return table


def _time(timing: Timing) -> str:
    return f"{_milliseconds(timing.median)} ({_milliseconds(timing.low)}–{_milliseconds(timing.high)})"


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _by_reason(layers: Iterable[LayerBenchmark]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for layer in layers:
        if layer.reason is not None:
            found.setdefault(layer.reason, []).append(layer.name)
    return found


def _takers(layers: Iterable[LayerBenchmark]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for layer in layers:
        for engine, refusal in layer.elsewhere.items():
            here = layer.kernel is not None and engine.startswith(f"torch {layer.kernel.partition(',')[0]}")
            if refusal is None and not here:
                found.setdefault(engine, []).append(layer.name)
    return found


def _never(layers: Iterable[LayerBenchmark]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for layer in layers:
        for sentence in layer.never:
            found.setdefault(sentence, []).append(layer.name)
    return found


def _names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
