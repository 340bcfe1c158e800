"""The tables of docs/scale.md: what several ranks take, measured on a CPU and projected to GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TITLES = {"resnet20": "ResNet20", "resnet50": "ResNet50", "wide": "MLP, 4,096 wide"}


def rank_steps() -> str:
    titles = ["network", "weights of the layer", "ranks", "computed by each, processor", "waiting included", "sum"]
    rows = [
        [
            TITLES[row["network"]], f"{row['weights']:,}", str(row["ranks"]), f"{row['cpu_seconds']:.2f} s",
            f"{row['compute_seconds']:.2f} s", f"{1000 * row['reduce_seconds']:.0f} ms" if row["ranks"] > 1 else "–",
        ]
        for row in _read("steps")
    ]  # fmt: skip
    return _table(titles, rows)


def rank_projection() -> str:
    titles = ["layer, K", "weights", "one H200", "8 GPUs", "64 GPUs"]
    found = _read("projection")
    rows = []
    for first in (row for row in found if row["gpus"] == 1):
        same = [r for r in found if all(r[key] == first[key] for key in ("network", "layer", "horizon"))]
        times = [f"{_ms(r['compute_seconds'])} + {_ms(r['reduce_seconds'])} ms" for r in same[1:]]
        name = f"{TITLES[first['network']]} `{first['layer']}`, {first['horizon']}"
        rows.append([name, f"{first['weights']:,}", f"{_ms(first['compute_seconds'])} ms", *times])
    return _table(titles, rows)


def rank_runs() -> str:
    titles = ["network", "samples", "GPUs", "shared", "done by every rank", "sums", "weights, twice", "activations"]
    rows = [
        [
            row["network"], f"{row['samples']:,}", str(row["gpus"]), *(_hours(row[f"{part}_hours"]) for part in
            ("shared", "own", "sum")), *(_gib(row[f"{part}_bytes"]) for part in ("weight", "activation")),
        ]
        for row in _read("runs")
    ]  # fmt: skip
    return _table(titles, rows)


def _read(section: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"ranks-{section}.json").read_text())["rows"]
    return rows


def _table(titles: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [titles, ["---"] * len(titles), *rows])


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


def _hours(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.1f} min" if hours else "–"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
