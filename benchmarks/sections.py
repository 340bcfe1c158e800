"""Benchmarks in sections: one JSON file each, written after every row, so that a long run can be split."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
    """Rows that the file has are not measured again. Each says by which code it was measured.

    Several processes may share a section: a row that another one measures is passed over.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for what, measure in section:
        with _claimed(path, what) as mine:
            if not mine or any(all(row.get(key) == value for key, value in what.items()) for row in _rows(path)):
                continue
            found = environment(device)
            row = {**what, **measure(), "commit": found["commit"]}
            with _locked(path.parent, fcntl.LOCK_EX):
                written = path.with_suffix(".new")
                written.write_text(json.dumps({"rows": [*_rows(path), row], "environment": found}, indent=2) + "\n")
                written.replace(path)  # at once: others read it meanwhile
            print(" ", json.dumps(row), flush=True)
    return _rows(path)


def _rows(path: Path) -> list[Row]:
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


@contextmanager
def _claimed(path: Path, what: Row) -> Iterator[bool]:
    """Whether this process is the one that measures the row. A process that dies gives its claim back."""
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    claim = path.with_name(f".{path.stem}-{digest}.claim")
    claim.touch()
    try:
        with _locked(claim, fcntl.LOCK_EX | fcntl.LOCK_NB):
            yield True
            claim.unlink(missing_ok=True)
    except BlockingIOError:
        yield False


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    handle = os.open(path, os.O_RDONLY)  # also of a folder
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)
