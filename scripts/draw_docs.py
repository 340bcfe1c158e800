"""Draws docs/figures from benchmarks/results. With --check: fails if a figure is not what the results say."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from paper.drawing import Line, line_chart, picture  # noqa: E402

RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def pattern() -> str:
    """Accuracy against sparsity, and N:M at theirs."""
    rows = [row for row in read("masks-unstructured")["rows"] if row["samples"] == 3000]
    cells = [row for row in read("compare-resnet20")["rows"] if row["snows"]]
    lines = [Line("a sparsity", [row["sparsity"] for row in rows], [row["accuracy"] for row in rows])]
    for mask in ("magnitude", "exchange"):
        chosen = sorted((row["sparsity"], 100 * row["top1"]) for row in cells if row["mask"] == mask)
        lines.append(Line(f"N:M, {mask}", *zip(*chosen, strict=True)))
    dense = read("masks-unstructured")["dense"]
    lines.append(Line("dense", [0.5, 0.9], [dense, dense]))
    return line_chart("ResNet20, CIFAR-10", lines, "sparsity", "top-1, %", marks=True)


def mask() -> str:
    rows = [row for row in read("compare-resnet20")["rows"] if row["pattern"] == "1:4"]
    names = list(dict.fromkeys(row["mask"] for row in rows))
    tops = {(row["mask"], row["snows"]): 100 * row["top1"] for row in rows}
    pairs = [(name, [tops[name, False], tops[name, True]]) for name in names]
    return bars("ResNet20, CIFAR-10, 1:4", pairs, ["mask alone", "with SNOWS"], "top-1, %")


def language() -> str:
    rows = [row for row in read("language")["rows"] if row.get("pattern") == "0.5"]
    figures = {(row["mask"], row["snows"]): row["perplexity"] for row in rows}
    pairs = [(name, [figures[name, False], figures[name, True]]) for name in ("wanda", "sparsegpt")]
    return bars("SmolLM2-135M, 50 % unstructured (dense: 21.0)", pairs, ["mask alone", "with SNOWS"], "perplexity")


def horizon() -> str:
    rows = read("choose-horizon")["rows"]
    line = Line("KL", [row["horizon"] for row in rows], [row["kl"] for row in rows])
    return line_chart("embedded network, 1:4, 500 images", [line], "K", "KL to the dense network", marks=True)


def samples() -> str:
    rows = read("choose-samples")["rows"]
    lines = []
    for name in dict.fromkeys(row["horizon"] for row in rows):
        mine = [row for row in rows if row["horizon"] == name]
        lines.append(Line(name, [row["samples"] for row in mine], [row["kl"] for row in mine]))
    return line_chart("embedded network, 1:4", lines, "samples", "KL to the dense network", log_x=True, marks=True)


def effort() -> str:
    rows = read("choose-effort")["rows"]
    lines = [Line("KL", [row["cpu_seconds"] for row in rows], [row["kl"] for row in rows])]
    lines += [Line(row["effort"], [row["cpu_seconds"]], [row["kl"]]) for row in rows]  # the same points, named
    return line_chart(
        "embedded network, 1:4, 500 images", lines, "seconds of one CPU core", "KL to the dense network", marks=True
    )


def memory() -> str:
    rows = [row for row in read("speed-memory")["rows"] if row["network"] == "resnet20"]
    lines = []
    for allowed in (None, "512MiB"):
        mine = [row for row in rows if row["memory"] == allowed]
        peaks = [row["peak_memory_bytes"] / 2**30 for row in mine]
        lines.append(Line(f"memory={allowed}", [row["samples"] for row in mine], peaks))
    return line_chart("ResNet20, CIFAR-10, on a GPU", lines, "samples", "peak memory, GiB", marks=True)


def along() -> str:
    rows = [row for row in read("choose-run")["rows"] if "stage" in row]
    lines = []
    for stage in ("SNOWS", "mask only", "K=0"):  # in the colors of the report: blue, orange, green
        errors = [row["error"] for row in rows if row["stage"] == stage]
        lines.append(Line(stage, list(range(1, len(errors) + 1)), errors))
    return line_chart("error of each layer's output", lines, "layer", "share of its variance", log_y=True)


def losses() -> str:
    rows = [row for row in read("choose-run")["rows"] if row.get("sweep") == 0]
    places = list(range(1, len(rows) + 1))
    before, after = [row["masked"] for row in rows], [row["loss"] for row in rows]
    lines = [Line("re-adjusted", places, after), Line("mask only", places, before)]
    return line_chart("K-step loss, first sweep", lines, "pruned layer", "loss", log_y=True, marks=True)


def weights() -> str:
    rows = [row for row in read("choose-run")["rows"] if "weights" in row]
    side, gap = 9, 24
    panels = [panel(row["values"], side) for row in rows]
    width = side * len(rows[0]["values"][0])
    parts = [f'<text class="title" x="8" y="18">{escape(rows[0]["layer"])}, middle of the kernel</text>']
    for index, (row, drawn) in enumerate(zip(rows, panels, strict=True)):
        left = 8 + index * (width + gap)
        parts.append(f'<g transform="translate({left} 46)">{drawn}</g><text x="{left}" y="40">{row["weights"]}</text>')
    return picture(parts, 16 + len(rows) * (width + gap) - gap, 60 + side * len(rows[0]["values"]))


def panel(values: Sequence[Sequence[float]], side: int) -> str:
    """Blue below zero, orange above; what is zero is left out."""
    largest = max(abs(value) for row in values for value in row)
    cells = []
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if value:
                colour, share = ("#c2571a" if value > 0 else "#0b6bcb"), (abs(value) / largest) ** 0.5
                cells.append(
                    f'<rect x="{x * side}" y="{y * side}" width="{side}" height="{side}" fill="{colour}" '
                    f'fill-opacity="{share:.2f}"/>'
                )
    height, width = len(values) * side, len(values[0]) * side
    return f'<rect class="axis" width="{width}" height="{height}"/>' + "".join(cells)


def bars(title: str, groups: Sequence[tuple[str, Sequence[float]]], names: Sequence[str], unit: str) -> str:
    """Horizontal bars from zero, with their values."""
    left, top, thick, room = 96, 54, 16, 340
    largest = max(value for _, values in groups for value in values)
    parts = [f'<text class="title" x="8" y="18">{escape(title)}</text>']
    for index, name in enumerate(names):
        parts.append(
            f'<g class="s{1 - index}"><rect x="{left + 130 * index}" y="28" width="12" height="12" '
            f'fill="currentColor"/></g><text x="{left + 130 * index + 18}" y="38">{escape(name)}</text>'
        )
    parts.append(f'<text x="{left + 280}" y="38">{escape(unit)}</text>')
    y = top
    for group, values in groups:
        parts.append(f'<text x="{left - 8}" y="{y + thick + 4}" text-anchor="end">{escape(group)}</text>')
        for index, value in enumerate(values):
            length = room * value / largest
            parts.append(
                f'<g class="s{1 - index}"><rect x="{left}" y="{y}" width="{length:.1f}" height="{thick - 2}" '
                f'fill="currentColor"/></g><text x="{left + length + 6:.1f}" y="{y + thick - 4}">{value:.1f}</text>'
            )
            y += thick
        y += 12
    return picture(parts, 520, y)


FIGURE: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (pattern, mask, horizon, samples, effort, language, memory, along, losses, weights)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    FIGURES.mkdir(exist_ok=True)
    for name, draw in FIGURE.items():
        path, text = FIGURES / f"{name}.svg", draw()
        if check and (not path.is_file() or path.read_text(encoding="utf-8") != text):
            sys.exit(f"{path.name} is not what the results say: run `python scripts/draw_docs.py`")
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
