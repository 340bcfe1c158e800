"""Benchmarks in sections: one JSON file each, written after every row, so that a long run can be split."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accuracy import HERE, environment

Row = dict[str, Any]
Section = Iterator[tuple[Row, Callable[[], Row]]]  # what a row is of, and how it is measured


def make_parser(description: str | None, sections: Iterable[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=list(sections))
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with data/ and checkpoints/")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, help="at most, instead of each row's own")
    return parser


def measure_rows(section: Section, path: Path, device: str) -> list[Row]:
    """Rows that the file has are not measured again. Each says by which code it was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    for what, measure in section:
        if any(all(row.get(key) == value for key, value in what.items()) for row in rows):
            continue
        found = environment(device)
        rows.append({**what, **measure(), "commit": found["commit"]})
        print(" ", json.dumps(rows[-1]), flush=True)
        path.write_text(json.dumps({"rows": rows, "environment": found}, indent=2) + "\n")
    return rows
