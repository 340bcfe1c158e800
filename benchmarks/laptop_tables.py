"""Writes the tables of docs/effort.md from the results of laptop.py, wide.py and versions.py. With --check: fails if
they are not up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

from tables import HERE, RESULTS, TITLES, Row, filled, gibibytes, read, table

PAGE = HERE.parent / "docs" / "effort.md"
NAMES = {**TITLES, "vit": "ViT-Ti/16, ImageNet", "resnet18": "ResNet18, random weights"}
WORST = 12  # layers with the most time above their floor


def name(row: Row) -> str:
    return NAMES[row["network"]]


def seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def machine(row: Row) -> str:
    return f"{row['threads']} × {row['gflops_of_a_cpu_second']:.0f} GFLOP/s, load {row['load']:.0f}"


def effort() -> str:
    titles = ["network", "pattern", "samples", "CPU time", "elapsed", "dense", "pruned", "drop, 95 %", "threads, load"]
    rows = [
        [
            name(row),
            row["pattern"],
            str(row["images"]),
            seconds(row["cpu_seconds"]),
            seconds(row["seconds"]),
            f"{row['dense']:.2f}" if "dense" in row else "–",
            f"**{row['pruned']:.2f}**" if "pruned" in row else "–",
            f"{row['drop']:.2f} ± {row['drop_interval']:.2f}" if "drop" in row else "–",
            machine(row),
        ]
        for row in read("laptop-effort")["rows"]
    ]
    return table(titles, rows)


def floor() -> str:
    titles = ["version", "CPU time", "its floor", "ratio", "elapsed", "threads, load"]
    rows = [
        [
            row["version"],
            seconds(row["cpu_seconds"]),
            seconds(row["floor_cpu_seconds"]),
            f"{row['cpu_seconds'] / row['floor_cpu_seconds']:.1f}",
            seconds(row["seconds"]),
            machine(row),
        ]
        for row in read("laptop-floor")["rows"]
    ]
    return table(titles, rows)


def parts() -> str:
    measured = read("laptop-profile")["rows"]
    rows = [
        [part, *(seconds(row["parts_cpu_seconds"][part]) for row in measured)]
        for part in measured[0]["parts_cpu_seconds"]
    ]
    total = ["**all**", *(f"**{seconds(row['cpu_seconds'])}**" for row in measured)]
    floors = ["floor", *(seconds(row["floor_cpu_seconds"]) for row in measured)]
    ratios = ["ratio", *(f"{row['cpu_seconds'] / row['floor_cpu_seconds']:.1f}" for row in measured)]
    titles = ["CPU time of", *(f"{name(row)}, {row['pattern']}" for row in measured)]
    return table(titles, [*rows, total, floors, ratios])


def layers() -> str:
    found = [
        (layer["taken"] - layer["floor"], name(row), key, layer)
        for row in read("laptop-profile")["rows"]
        for key, layer in row["layers_cpu_seconds"].items()
    ]
    found.sort(key=lambda one: -one[0])
    rows = [
        [network, f"`{key}`", seconds(layer["taken"]), f"{layer['floor']:.2f} s"] for _, network, key, layer in found
    ]
    return table(["network", "layer", "CPU time", "its floor"], rows[:WORST])


def closed_form() -> str:
    titles = ["layer", "blocks", "one factor", "loss above the least: blocks", "one factor"]
    rows = [
        [
            f"`{row['layer']}`",
            f"{row['seconds_blocks']:.1f} s",
            f"{row['seconds_one_factor']:.1f} s",
            f"{row['excess_blocks']:.0e}",
            f"{row['excess_one_factor']:.0e}",
        ]
        for row in read("wide-closed-form-cpu")["rows"]
    ]
    return table(titles, rows)


def versions() -> str:
    titles = ["network", "pattern", "version", "time", "memory", "pruned", "gain over 0.12, 95 %"]
    rows = []
    for row in read("versions-cuda")["rows"]:
        gain = f"{-row['drop']:.2f} ± {row['drop_interval']:.2f}"
        for suffix, gained in (("_before", ""), ("", gain)):
            size, accuracy = gibibytes(row[f"peak_memory_bytes{suffix}"]), row[f"accuracy{suffix}"]
            time = seconds(row[f"seconds{suffix}"])
            rows.append([name(row), row["pattern"], row[f"version{suffix}"], time, size, f"{accuracy:.2f}", gained])
    return table(titles, rows, read("versions-cuda")["environment"]["device"])


def newton(device: str = "cuda") -> str:
    titles = ["layer", "before", "products", "time", "loss", "one factor: products", "time", "loss"]
    rows = [
        [
            f"`{row['layer']}`",
            {"none": "plain CG"}.get(row["before"], row["before"]),
            str(row["products_before"]),
            f"{row['seconds_before']:.2f} s",
            f"{row['loss_before']:.4f}",
            str(row["products"]),
            f"{row['seconds']:.2f} s",
            f"{row['loss']:.4f}",
        ]
        for row in read(f"wide-newton-{device}")["rows"]
    ]
    return table(titles, rows, read(f"wide-newton-{device}")["environment"]["device"] if device == "cuda" else None)


TABLES: dict[str, tuple[str, Callable[[], str]]] = {  # which result it is of
    "effort": ("laptop-effort", effort),
    "floor": ("laptop-floor", floor),
    "parts": ("laptop-profile", parts),
    "layers": ("laptop-profile", layers),
    "versions": ("versions-cuda", versions),
    "newton": ("wide-newton-cuda", newton),
    "newton-cpu": ("wide-newton-cpu", partial(newton, "cpu")),
    "closed-form": ("wide-closed-form-cpu", closed_form),
}


def not_measured() -> str:
    return "Not measured yet."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    tables = {
        key: make if (RESULTS / f"{file}.json").exists() else not_measured for key, (file, make) in TABLES.items()
    }
    text = PAGE.read_text(encoding="utf-8")
    new = filled(text, tables)
    if options.check and new != text:
        sys.exit(f"{PAGE.name} is not up to date: run `make docs-table`")
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
