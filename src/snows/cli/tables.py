"""Results as tables on the terminal."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import as_line, one_line, printable
from ..results.figures import amount, is_share, measure_title
from ..words import counted, to_pattern

if TYPE_CHECKING:
    from ..evaluation.inspection import Inspection
    from ..evaluation.table import Comparison
    from ..evaluation.tolerance import Level, Sensitivity
    from ..graph.flops import FlopCount
    from ..results.report import Report
    from ..results.verification import Verification


def print_prune(report: Report, out: Path | None, as_json: bool, quiet: bool) -> None:
    if as_json:
        print(report.to_json())
        return
    if quiet:
        return
    console = make_console()
    if report.evaluation:
        console.print(evaluation_table(report.evaluation, None))
    layers = counted(len(report.layers), "layer")
    console.print(
        f"{report.model} {to_pattern(report.pattern)}: {report.sparsity:.1%} of the weights of {layers} removed, "
        f"{report.network_sparsity:.1%} of the network's; {report.samples} samples, {report.seconds:.1f} s",
    )
    if report.network_flops:
        console.print(f"  {flops_line(report.flops)}")
    for line in _prune_notes(report):
        console.print(f"  {line}")
    if out is None:
        console.print("Nothing was saved: pass --out DIR to keep the result.")
    else:
        console.print(f"Saved to {out}")


def _prune_notes(report: Report) -> Iterator[str]:
    """What else is worth knowing of a run."""
    if report.recalled_solves:
        yield f"{report.recalled_solves} solves were finished before and are not in this time"
    rejected = sum(solve.worse for layer in report.layers for solve in layer.solves)
    if rejected:
        solves = sum(len(layer.solves) for layer in report.layers)
        yield f"{rejected} of {solves} solves did worse on held-out samples; their start, or part of the way, was kept"
    if report.permutation:
        before, after = report.permutation["kept_before"], report.permutation["kept_after"]
        yield f"channels re-ordered: N:M masks keep {after:.1%} of the magnitude instead of {before:.1%}"
    yield from (f"warned: {said}" for said in report.warnings if said.endswith(" times)"))  # others were shown
    yield from (f"left dense: {layer.name}: {layer.reason}" for layer in report.dense_layers)


def evaluation_table(rows: list[dict[str, Any]], samples: int | None) -> Table:
    table = Table(title=None if samples is None else f"{samples} samples")
    table.add_column("network")
    columns = [key for key in rows[0] if key != "network"]
    for key in columns:
        table.add_column(measure_title(key), justify="right")
    for row in rows:
        table.add_row(row["network"], *(_figure(key, row[key]) for key in columns))
    return table


def _figure(key: str, value: float) -> str:
    if is_share(key):
        return f"{value:.2%}"
    return f"{value:.2f}" if key == "perplexity" else f"{value:.4f}"


def print_comparison(found: Comparison, as_json: bool, markdown: bool, quiet: bool) -> None:
    if as_json or markdown:
        print(found.to_json() if as_json else printable(found.to_markdown().rstrip()))
        return
    if quiet:
        return
    console = make_console()
    titles, rows = found.table()
    left_out = _too_wide(titles, rows, console.width)
    shown = [index for index, title in enumerate(titles) if title not in left_out]
    table = Table()
    for index in shown:
        table.add_column(titles[index], justify="right" if index > 2 else "left", overflow="fold")
    for row, after in itertools.zip_longest(rows, rows[1:]):
        table.add_row(*(row[index] for index in shown), end_section=after is not None and after[0] != row[0])
    console.print(table)
    for failure in found.failed:
        console.print(f"  failed: {failure.name}: {failure.error}")
    console.print(found.summary)
    if left_out:
        console.print(f"Too wide for this terminal: {', '.join(left_out)}; --markdown and --json show them.")
    if found.reused:
        console.print(f"{found.reused} of {len(found.pruned)} were there already.")


def print_retraining(report: Report, out: Path, as_json: bool, quiet: bool) -> None:
    if as_json:
        print(report.to_json())
    if as_json or quiet:
        return
    console = make_console()
    if report.evaluation:
        console.print(evaluation_table(report.evaluation, None))
    done = report.retraining
    if done is None:
        return
    before, after = (
        ", ".join(f"{measure_title(name)} {_figure(name, value)}" for name, value in figures.items())
        for figures in (done.before, done.after)
    )
    console.print(f"{done.held_out_samples} held-out samples: {before} before, {after} after retraining")
    chosen = (
        f"epoch {done.best_epoch} of {done.history[-1].epoch}" if done.best_epoch else "before: no epoch was better"
    )
    console.print(f"  kept are the weights of {chosen} (judged by {measure_title(done.measure)})")
    if done.recalled_epochs:
        console.print(f"  {done.recalled_epochs} epochs were finished before and are not in the {done.seconds:.0f} s")
    console.print(f"Saved to {out}")


def _too_wide(titles: list[str], rows: list[list[str]], width: int) -> list[str]:
    """Columns to leave out, the least important first, so that the others fit. Long names are folded."""
    longest = [max(len(row[index]) for row in [titles, *rows]) for index in range(len(titles))]
    needed = sum(min(size, 20) + 3 for size in longest) + 1
    left_out: list[str] = []
    for title in ("top-5", "loss", "KL", "agreement") if "top-1" in titles else ():
        if needed > width and title in titles:
            needed -= longest[titles.index(title)] + 3
            left_out.append(title)
    return left_out


def _beside_whole_names(titles: list[str], rows: list[list[str]], width: int) -> list[str]:
    """Columns to leave out, the least important first, so that the names of layers fit as they are."""
    longest = {title: max(len(row[index]) for row in [titles, *rows]) for index, title in enumerate(titles)}
    left_out: list[str] = []
    for title in ("curvature", "K", "memory", "shape"):
        if sum(size + 3 for name, size in longest.items() if name not in left_out) + 1 > width:
            left_out.append(title)
    return left_out


def print_inspection(found: Inspection) -> None:
    console = make_console()
    titles = ["layer", "shape", "pattern", "K", "curvature", "memory", "time"]
    rows = [
        [
            layer.name, "x".join(map(str, layer.shape)), layer.pattern, str(layer.horizon), layer.curvature,
            f"{layer.memory_bytes / 2**30:.2f} GiB", f"{layer.seconds:.1f} s",
        ]
        for layer in found.layers
        if layer.pattern is not None
    ]  # fmt: skip
    left_out = _beside_whole_names(titles, rows, console.width)
    shown = [index for index, title in enumerate(titles) if title not in left_out]
    table = Table(title=f"{found.model}: {found.network_weights:,} weights; {found.samples} samples")
    for index in shown:
        left = titles[index] in ("layer", "shape", "pattern", "curvature")
        table.add_column(titles[index], justify="left" if left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(row[index] for index in shown))
    console.print(table)
    if left_out:
        console.print(f"Too wide for this terminal: {', '.join(left_out)}; --json shows them.")
    for layer in found.layers:
        if layer.pattern is None:
            console.print(f"  left dense: {layer.name} ({'x'.join(map(str, layer.shape))}): {layer.reason}")
    console.print(
        f"estimates for {found.sweeps} sweep{'s' if found.sweeps != 1 else ''}: "
        f"{found.memory_bytes / 2**30:.1f} GiB at the peak, {found.seconds:.0f} s here"
        + (f", {found.finish_seconds:.0f} s of these for the last stage" if found.finish_seconds else ""),
    )
    if found.weights_at_rest:
        console.print(
            f"the weights do not fit: {found.weights_at_rest / 2**30:.1f} GiB rest in host memory (of a run on the "
            f"CPU: on disk), and {found.room_bytes / 2**30:.1f} GiB of the memory are for copies of those at hand"
        )
    console.print(flops_line(found.flops))


def flops_line(count: FlopCount) -> str:
    without = f" ({count.reduction_without_attention:.2f} without attention's products)" if count.attention else ""
    return (
        f"FLOPs of one sample: {amount(count.dense)} dense, {amount(count.sparse)} sparse, "
        f"{count.reduction:.2f} times fewer{without}"
    )


def print_sensitivity(found: Sensitivity, console: Console) -> None:
    """Errors with the mask only and re-adjusted, layer by layer; below them the accuracy, where it was measured."""
    shown = list(found.patterns)
    names = max(len(layer.name) for layer in found.layers) + 3
    while len(shown) > 1 and names + 16 * len(shown) > console.width:
        shown.pop(0)  # the mildest come first
    table = Table(title=f"{found.model}: one layer pruned, all others dense; {found.judged_samples} samples")
    table.add_column("layer", overflow="fold")
    for pattern in shown:
        table.add_column(pattern, justify="right")
    for layer in found.layers:
        levels = [layer.level(pattern) for pattern in shown]
        table.add_row(layer.name, *("–" if level is None else _levels(level) for level in levels))
    console.print(table)
    dense = "" if found.dense_accuracy is None else f", and accuracy (dense {found.dense_accuracy:.1%})"
    console.print(f"error of the outputs, relative to their variance{dense}: mask only → re-adjusted")
    if left_out := [pattern for pattern in found.patterns if pattern not in shown]:
        console.print(f"Too wide for this terminal: {', '.join(left_out)}; --json and --out show them.")


def _levels(level: Level) -> str:
    masked, readjusted = level.mask_only, level.readjusted
    text = f"{100 * masked.error:.2g} → {100 * readjusted.error:.2g} %"
    if masked.accuracy is None or readjusted.accuracy is None:
        return text
    return f"{text}\n{100 * masked.accuracy:.1f} → {100 * readjusted.accuracy:.1f} %"


def print_verification(directory: Path, found: Verification, as_json: bool, quiet: bool) -> None:
    if as_json:
        print(json.dumps({"ok": found.ok, **dataclasses.asdict(found)}, indent=2))
        return
    if quiet:
        return
    for finding in found.findings:
        say(finding)
    for note in found.notes:
        say(f"note: {note}")
    if found.ok:
        say(
            f"{directory} is as it was written: {counted(found.files, 'file')}, {counted(found.layers, 'pruned layer')}"
        )


def make_console() -> Console:
    """Names of layers and files are not read as markup, nor obeyed by the terminal."""
    return _Console(markup=False, highlight=False)


def say(text: str) -> None:
    """One line of plain text."""
    print(one_line(text))


class _Console(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """A text is one line: a name with a line break in it cannot look like a line of ours."""
        super().print(*(as_line(given) if isinstance(given, str) else given for given in objects), **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """All text that is printed, cells of tables included."""
        return super().render_str(printable(text), **options)
