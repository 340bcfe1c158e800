"""`snows sensitivity`, and the file it writes as a pattern."""

from __future__ import annotations

import json
from pathlib import Path

from ..conftest import Outcome, Snows, assert_error
from .helpers import DATA, PRUNE

START = ("sensitivity", "net.py:model", *DATA)


def test_the_file_is_a_pattern(run: Snows, tmp_path: Path) -> None:
    file = tmp_path / "layers.json"
    table = run(*START, "--out", file)
    assert (table.status, table.err) == (0, "")
    for part in ("0.95", "2:4", "→", "re-adjusted", f"--pattern '0.7 measured={file}'"):
        assert part in table.out
    assert "<svg" in file.with_suffix(".html").read_text()
    report = run(*PRUNE, "--pattern", f"0.5 measured={file}", "--json").data
    assert report["sparsity"] == 0.5
    assert report["pattern"] == f"0.5 measured={file}"
    # nothing is overwritten
    assert_error(run(*START, "--out", file), 2, "exists; choose another name, or remove it")


def test_what_is_printed(run: Snows) -> None:
    found = run(*START, "--pattern", "0.5,0.9", "--pattern", "2:4", "--layers", "*", "--json").data
    assert found["patterns"] == ["0.5", "0.9", "2:4"]
    assert {len(layer["levels"]) for layer in found["layers"]} <= {2, 3}
    assert run(*START, "--pattern", "0.5", "--quiet") == Outcome(0, "", "")


def test_wrong_words(run: Snows, tmp_path: Path) -> None:
    assert_error(run(*START, "--out", tmp_path / "layers.txt"), 2, "expected a file that ends in .json")
    assert_error(run(*START, "--out", tmp_path / "no" / "layers.json"), 2, "there is no folder")
    missing = tmp_path / "missing.json"
    assert_error(run(*PRUNE, "--pattern", f"0.5 measured={missing}"), 1, "there is no file")
    (tmp_path / "other.json").write_text(json.dumps({"kind": "report", "schema": 1}))
    other = f"0.5 measured={tmp_path}/other.json"
    assert_error(run(*PRUNE, "--pattern", other), 1, "holds no measurements")
