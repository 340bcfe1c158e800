"""Writes the tables of the README from benchmarks/results. With --check: fails if they are not up to date."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- accuracy:begin -->", "<!-- accuracy:end -->"
TITLES = {
    "resnet20": "ResNet20, CIFAR-10",
    "resnet50": "ResNet50, ImageNet",
    "mobilenet": "MobileNetV1, ImageNet",
}


def row(result: dict[str, Any]) -> str:
    case, summary = result["case"], result["summary"]
    memory = f"{summary['peak_memory_gib']:.1f} GiB" if summary["peak_memory_gib"] else "–"
    cells = [
        TITLES[case["network"]],
        case["pattern"],
        case["recipe"],
        str(case["samples"]),
        str(len(case["seeds"])),
        f"{summary['dense']:.2f}",
        f"{summary['mask_only']:.2f}",
        f"{summary['layerwise']:.2f}",
        f"**{summary['snows']:.2f}**",
        f"{summary['drop']:.2f} ± {summary['drop_interval']:.2f}",
        f"{summary['seconds']:.0f} s",
        memory,
    ]
    return "| " + " | ".join(cells) + " |"


def table() -> str:
    titles = ["network", "pattern", "recipe", "images", "orders", "dense", "mask only", "K=0", "SNOWS", "drop, 95 %"]
    titles += ["time", "memory"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    results = [json.loads(path.read_text()) for path in sorted((HERE / "results").glob("accuracy-*.json"))]
    order = list(TITLES)
    results.sort(key=lambda r: (order.index(r["case"]["network"]), r["case"]["pattern"] != "2:4", r["case"]["recipe"]))
    devices = sorted({result["environment"]["device"] for result in results})
    return "\n".join([*lines, *map(row, results), "", f"Measured on: {', '.join(devices)}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    new = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if options.check:
        sys.exit(0 if new == text else "README.md is not up to date: run `make docs-table`")
    README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
