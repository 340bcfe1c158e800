"""The paper, re-run: every entry works, scaled down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def paper(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paper", *map(str, arguments)]
    return subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=False)


def test_entries_are_listed(tmp_path: Path) -> None:
    listed = paper("--out", tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert "nm" in listed.stdout
    assert "Error bound of the appendix" in listed.stdout


def test_what_is_done_is_not_measured_again(tmp_path: Path) -> None:
    first = paper("--quick", "flops", "--out", tmp_path)
    assert first.returncode == 0, first.stderr
    rows = json.loads((tmp_path / "flops.json").read_text())["rows"]
    assert [row["network"] for row in rows] == ["resnet20"]
    assert rows[0]["reduction"] > 3
    again = paper("--quick", "flops", "--out", tmp_path)
    assert '"reduction"' in first.stdout
    assert '"reduction"' not in again.stdout


def test_an_unknown_entry_is_named(tmp_path: Path) -> None:
    refused = paper("table7", "--out", tmp_path)
    assert refused.returncode == 2
    assert "table7: no such entry" in refused.stderr


@pytest.mark.slow
def test_all_entries_run_scaled_down(tmp_path: Path) -> None:
    done = paper("--quick", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    names = {path.stem for path in tmp_path.glob("*.json")}
    assert {"horizon", "nm", "unstructured", "first_layer", "curvature", "cg_caps", "vit", "transfer", "flops"} <= names
    bound = json.loads((tmp_path / "bound.json").read_text())["rows"]
    assert all(row["error"] <= row["bound"] for row in bound)
    figures = list(tmp_path.glob("*.svg"))
    assert figures
    assert all("prefers-color-scheme: dark" in figure.read_text() for figure in figures)
