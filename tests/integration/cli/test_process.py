"""The command line in a process of its own: what only that shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import snows
from snows.data.weights import read_state

from ..conftest import Outcome, Snows, assert_error
from .helpers import FILES, same, weights

ROOT = Path(__file__).parents[3]
ENTRY_POINT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["snows"]
ENVIRONMENT = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}


def process(*words: str | Path) -> Outcome:
    """`python -m snows ...` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "snows", *map(str, words)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("words", [[], ["prune"], ["evaluate"], ["inspect"], ["compare"], ["verify"]])
def test_help_imports_neither_torch_nor_numpy(words: list[str]) -> None:
    """The installed entry point, where importing them fails."""
    module, function = ENTRY_POINT.split(":")
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['numpy'] = None\n"
        f"sys.argv = ['snows', *{words}, '--help']\n"
        f"from {module} import {function}\n"
        f"{function}()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage:" in done.stdout


def test_the_list_of_commands_fits_a_line_each() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "snows", "--help"], capture_output=True, text=True, env={**ENVIRONMENT, "COLUMNS": "80"}
    )
    commands = done.stdout.split("Commands:\n")[1].splitlines()
    assert len(commands) >= 10
    assert all(line.endswith(".") and not line.endswith("...") and len(line) <= 80 for line in commands), commands


def test_a_run_from_end_to_end(tmp_path: Path) -> None:
    words = ("prune", "net.py:model", "--data", "net.py:labelled", "--pattern", "2:4", "--recipe", "fast.json")
    first = process(*words, "--out", tmp_path / "out")
    assert first.status == 0, first.err
    for part in ("dense", "mask only", "SNOWS (K=2)", "top-1", "agreement", "100.00%", "Saved to", "2 layers removed"):
        assert part in first.out
    assert "left dense: 0: first layer" in first.out
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    masks = read_state(tmp_path / "out" / "masks.safetensors")
    assert {name: float(mask.float().mean()) for name, mask in masks.items()} == {"2.weight": 0.5, "4.weight": 0.5}
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["source"] == "net.py:model"
    assert [row["network"] for row in report["evaluation"]] == ["dense", "mask only", "SNOWS (K=2)"]
    assert report["evaluation"][0]["top1"] == 1
    # the recorded name rebuilds it, and evaluation finds what prune found
    loaded = snows.load(tmp_path / "out", trust=True)
    assert same(dict(loaded.state_dict()), weights(tmp_path / "out"))

    # refused before any work, and left as it was
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = process("prune", "missing.py:model", "--out", tmp_path / "out")
    assert_error(again, 1, "out exists and is not empty; choose another folder or remove it first")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_no_command_and_version(run: Snows) -> None:
    bare = run()
    assert (bare.status, bare.out) == (2, "")
    assert "Usage: " in bare.err
    assert run("--version") == Outcome(0, f"snows {snows.__version__}\n", "")
