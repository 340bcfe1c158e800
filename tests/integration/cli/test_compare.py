"""`snows compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import snows
from snows.cli.request import split_patterns

from ..conftest import Outcome, Snows, assert_error, strict_json

COMPARE = ("compare", "net.py:model", "--recipe", "fast.json", "--data")


def test_the_command(run: Snows, tmp_path: Path) -> None:
    words = (
        *COMPARE,
        "net.py:labelled",
        "--pattern",
        "2:4",
        "--mask",
        "magnitude,wanda",
        "--out",
        tmp_path / "out",
    )
    table = run(*words)
    assert (table.status, table.err) == (0, "")
    for part in ("top-1", "drop", "top-5", "KL", "agreement", "wanda", "2:4", "48 test samples", "cpu"):
        assert part in table.out
    assert "there already" not in table.out
    narrow = run(*words, columns=80)
    assert "4 of 4 were there already." in narrow.out
    assert max(map(len, narrow.out.splitlines())) <= 80
    assert "top-1" in narrow.out
    assert "Too wide for this terminal: top-5" in narrow.out
    markdown = run(*words, "--markdown")
    assert markdown.out == (tmp_path / "out" / "comparison.md").read_text()
    data = run(*words, "--json")
    assert data.err == ""
    assert data.data == strict_json((tmp_path / "out" / "comparison.json").read_text())
    assert run(*words, "--quiet") == Outcome(0, "", "")
    assert_error(run(*words, "--seed", 1), 1, "was made with other settings (seed was 0 and is 1)")


def test_patterns_and_masks_of_the_command(run: Snows, tmp_path: Path) -> None:
    save_file({"2.weight": torch.arange(256).view(16, 16) % 4 == 0}, tmp_path / "mine.safetensors")
    data = run(
        *COMPARE, "net.py:unlabelled", "--pattern", "2:4, 4=dense", "--mask", "magnitude",
        "--mask", f"{tmp_path / 'mine.safetensors'}", "--json",
    ).data  # fmt: skip
    assert [(row["pattern"], row["mask"], row["sparsity"]) for row in data["rows"][1::2]] == [
        ("4=dense, *=2:4", "magnitude", 0.5),
        ("given", str(tmp_path / "mine.safetensors"), 0.75),
    ]
    assert {(row["top1"], row["loss"], row["drop"]) for row in data["rows"]} == {(None, None, None)}
    assert all(row["agreement"] > 0 for row in data["rows"])
    assert split_patterns(["1:4,2:4", "0.7"]) == ["1:4", "2:4", "0.7"]
    assert split_patterns(["1:4, head=dense"]) == ["1:4, head=dense"]


def test_failures_of_the_command(run: Snows) -> None:
    start = (*COMPARE, "net.py:labelled")
    some = run(*start, "--pattern", "2:4,3:7", "--mask", "magnitude")
    assert some.status == 0
    assert some.out.count("failed: magnitude, 3:7, with") == 2
    everything = run(*start, "--pattern", "3:7", "--mask", "magnitude", "--quiet")
    assert_error(everything, 1, "nothing could be compared: magnitude, 3:7, without SNOWS: no layer can be pruned")
    bare = run(*COMPARE, "net.py:calibration", "--mask", "magnitude", "--json")
    assert bare.err.startswith("warning: there are no test samples")
    assert len(bare.data["rows"]) == 3
    assert_error(run(*start, "--json", "--markdown"), 2, "--json and --markdown are both given")
    assert_error(run("compare", "missing.py:model", *start[2:], "--pattern", "2:4,half"), 2, "pattern 'half'")
    assert_error(run("compare", "missing.py:model", *start[2:], "--mask", "wanda,best"), 2, "mask 'best' is not known")
    assert_error(run("compare", "net.py:model"), 2, "--data is needed")


def test_an_interruption_of_the_command(run: Snows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any, **options: Any) -> snows.Result:
        if options["solver"] == "newton":
            raise KeyboardInterrupt
        return snows.prune(*given, **options)

    monkeypatch.setattr("snows.evaluation.comparison.prune", interrupted)
    words = (*COMPARE, "net.py:labelled", "--mask", "magnitude")
    bare = run(*words)
    assert bare.status == 130
    assert bare.out.count("magnitude") == 1
    assert bare.err.splitlines()[-1] == "interrupted; 1 network finished; --out DIR keeps finished networks"
    kept = run(*words, "--json", "--out", tmp_path / "out")
    assert (kept.status, len(strict_json(kept.out)["rows"])) == (130, 2)
    said = f"interrupted; 1 network finished and kept in {tmp_path / 'out'}; the same command continues"
    assert kept.err.splitlines() == [said]
    assert len(list((tmp_path / "out" / "cells").iterdir())) == 2
