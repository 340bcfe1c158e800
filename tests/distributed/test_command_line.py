"""`torchrun -m snows`: one rank writes and speaks."""

from __future__ import annotations

import json
from pathlib import Path

import snows
from tests.distributed.torchrun import torchrun

PRUNE = ("prune", "--samples", "48", "--horizon", "0", "--device", "cpu")


def finish(ranks: int, *words: str) -> tuple[int, str, str]:
    process = torchrun(ranks, "snows", *words)
    out, errors = process.communicate(timeout=300)
    return process.returncode, out, errors


def test_prune_writes_and_prints_once(tmp_path: Path) -> None:
    status, out, errors = finish(2, *PRUNE, "--out", str(tmp_path / "pruned"), "--json")
    assert status == 0, errors
    assert json.loads(out)["sparsity"] == 0.75
    assert snows.verify(tmp_path / "pruned").ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pruned"]


def test_what_layers_tolerate_is_written_once(tmp_path: Path) -> None:
    words = ("--samples", "48", "--pattern", "0.5", "--layers", "layer3.*", "--device", "cpu", "--json")
    status, out, errors = finish(2, "sensitivity", *words, "--out", str(tmp_path / "found.json"))
    assert status == 0, errors
    assert json.loads(out) == json.loads((tmp_path / "found.json").read_text())
    assert len(json.loads(out)["layers"]) > 2


def test_errors_are_said_once() -> None:
    status, out, errors = finish(2, *PRUNE, "--pattern", "9:4")
    assert status != 0
    assert out == ""
    assert errors.count("error: pattern") == 1, errors


def test_the_first_rank_alone_does_what_is_not_shared() -> None:
    status, out, errors = finish(2, "inspect", "--samples", "48", "--json", "--device", "cpu")
    assert status == 0, errors
    assert json.loads(out)["layers"]
