"""`snows bench` from the command line, and its file in `snows prune`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cli.helpers import PRUNE
from tests.integration.conftest import Snows, assert_error

MODEL = ("--model", "net.py:model")


@pytest.fixture(scope="module")
def folder(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saved") / "pruned"
    words = [sys.executable, "-m", "snows", *PRUNE, "--pattern", "2:4", "--out", out, "--quiet"]
    subprocess.run(words, check=True, cwd=place)
    return out


def test_tables_and_a_file(run: Snows, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    words = ("bench", folder, *MODEL, "--batch", "1,2", "--engine", "openvino", "--device", "cpu", "--limit", "20")
    shown = run(*words, "--out", file).shown
    assert "the whole network" in shown
    assert "openvino" in shown
    assert "FLOPs of one sample:" in shown
    data = json.loads(file.read_text())
    assert f"Saved to {file}" in shown
    assert (f"--layers {file}" in shown) is bool(data["prune"])
    assert data["kind"] == "snows.bench/1"
    assert_error(run(*words, "--out", file), 2, "exists; choose another name, or say that it may be replaced (--force)")
    data["prune"] = [data["layers"][0]["name"]]
    file.write_text(json.dumps(data))
    report = run(*PRUNE, "--pattern", "2:4", "--layers", file, "--json").data
    assert [layer["name"] for layer in report["layers"]] == data["prune"]


def test_only_timings_are_replaced_and_only_when_told(run: Snows, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    words = ("bench", folder, *MODEL, "--batch", "1", "--engine", "openvino", "--limit", "0.01", "--quiet")
    assert_error(run(*words, "--force"), 2, "--force says that a file may be replaced; expected --out FILE with it")
    for mine in ("mine", '{"kind": "mine"}'):
        file.write_text(mine)
        assert_error(run(*words, "--out", file, "--force"), 2, "was not written by snows bench, so it is not replaced")
        assert file.read_text() == mine
    file.write_text('{"kind": "snows.bench/1"}')
    assert run(*words, "--out", file, "--force").status == 0
    assert json.loads(file.read_text())["batches"] == [1]


def test_json_and_quiet(run: Snows, folder: Path) -> None:
    words = ("bench", folder, *MODEL, "--batch", "1", "--engine", "openvino", "--limit", "0.01")
    assert run(*words, "--json").data["batches"] == [1]
    assert run(*words, "--quiet").shown == ""


def test_what_is_refused(run: Snows, folder: Path, tmp_path: Path) -> None:
    assert_error(run("bench", tmp_path, *MODEL), 1, "cannot be used: there is no")
    assert_error(run("bench", folder, *MODEL, "--batch", "1,x"), 2, "--batch is '1,x'; expected whole numbers")
    assert_error(run("bench", folder, *MODEL, "--out", "b.txt"), 2, "expected a file that ends in .json")
    assert_error(run("bench", folder, *MODEL, "--engine", "tensorrt"), 2, "'tensorrt' is not known; expected torch,")
    words = ("--device", "cpu", "--dtype", "bfloat16")
    assert_error(run("bench", folder, *MODEL, *words), 2, "'bfloat16' cannot be timed on cpu")
