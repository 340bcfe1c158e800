"""Timings as tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    for reason, layers in _grouped((layer.reason, layer) for layer in found.layers).items():
        if reason is not None:
            console.print(f"  not sparse here: {_names(layers)}: {reason}")
    _print_elsewhere(found.layers, console)
    for sentence, layers in _grouped((words, layer) for layer in found.layers for words in layer.never).items():
        console.print(f"  {_names(layers)}: {sentence}")
    if found.not_timed:
        console.print(f"  the time limit left out {len(found.not_timed)}: {_names(list(found.not_timed))}")
    if found.flops:
        count = FlopCount(*(int(found.flops[name]) for name in ("dense", "sparse", "attention")))
        console.print(f"{flops_line(count)}. That is no time; times are above.")
    for sentence in (*_fastest(found), *_advice(found)):
        console.print(sentence)


def _fastest(found: Benchmark) -> list[str]:
    best = [row for batch in found.batches if (row := found.fastest(batch))]
    ways = [f"at batch {row.batch}: {row.engine}, {row.mode}, weights {row.weights}" for row in best]
    return [f"Fastest whole network {way}" for way in ways]


def _advice(found: Benchmark) -> list[str]:
    """The whole network first: an engine may gain where none of torch's layers does."""
    gains = [(batch, row, times) for batch in found.batches for row, times in found.gains(batch)]
    ways = [
        f"{row.engine}, {row.mode}, batch {batch}, weights {row.weights}: {x:.2f} times{_beaten(found, batch)}"
        for batch, row, x in gains
    ]
    faster = [f"The whole network was faster sparse than dense in {'; '.join(ways)}"] if ways else []
    if found.prune:
        words = "Only single layers were faster sparse; the whole network was not, in any way that was timed."
        whole = [words] if found.sparse_network and not ways else []
        layers = f"{len(found.prune)} of {len(found.layers)} layers: {', '.join(found.prune)}"
        return [*faster, *whole, f"If speed in torch is the goal, prune {layers}"]
    if ways:
        return [*faster, "No single layer was faster sparse in torch, so that there is no list of layers to prune."]
    if not found.sparse_network and not any(layer.timings for layer in found.layers):
        return ["Nothing sparse was timed, so that nothing says whether pruning makes this network faster here."]
    timed = " that was timed" if found.not_timed else ""
    return [f"Nothing{timed} was faster sparse here: pruning makes this network smaller at most, not faster."]


def _beaten(found: Benchmark, batch: int) -> str:
    """What gains in one engine may still be slower than dense weights in another."""
    best = found.fastest(batch)
    if best is None or best.weights != "dense":
        return ""
    return f" (dense weights in {best.engine}, {best.mode}, are faster still)"


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


def _print_elsewhere(layers: Sequence[LayerBenchmark], console: Console) -> None:
    """Which layers other engines take by their own rules, and why not the others. The engine timed here is left out."""
    from ..timing.possibilities import RULES

    here = {f"torch {layer.kernel.partition(',')[0]}" for layer in layers if layer.kernel is not None}
    for engine, rule in RULES.items():
        if engine.startswith(tuple(here)):
            continue
        answers = _grouped((layer.elsewhere[engine], layer) for layer in layers if engine in layer.elsewhere)
        if answers:
            taken = answers.pop(None, [])
            names = f" ({_names(taken)})" if taken else ""
            console.print(f"  elsewhere: {engine} takes {rule}: {len(taken)} of {len(layers)} layers{names}; not timed")
        for refusal, others in answers.items():
            console.print(f"    not {_names(others)}: {refusal}")


def _grouped(pairs: Iterable[tuple[str | None, LayerBenchmark]]) -> dict[str | None, list[str]]:
    """The names of layers by what is said of them."""
    found: dict[str | None, list[str]] = {}
    for key, layer in pairs:
        found.setdefault(key, []).append(layer.name)
    return found


def _names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
