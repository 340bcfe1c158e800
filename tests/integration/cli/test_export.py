"""`snows export` from the command line."""

from __future__ import annotations

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


def test_a_table_and_what_was_checked(run: Snows, folder: Path, tmp_path: Path) -> None:
    shown = run("export", folder, "--to", "onnx", *MODEL, "--out", tmp_path / "out").shown
    assert "model.onnx" in shown
    assert "opset: 18" in shown
    assert "outputs at batch sizes 1, 2, 3: at most" in shown
    assert f"removed weights are zero in it. Written to {tmp_path / 'out'}" in " ".join(shown.split())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["export.json", "model.onnx"]


def test_json_and_quiet(run: Snows, folder: Path, tmp_path: Path) -> None:
    found = run("export", folder, "--to", "safetensors", *MODEL, "--out", tmp_path / "a", "--json").data
    assert found["removed"] == 256
    assert set(found["files"]) == {"model.safetensors", "model.compact.safetensors"}
    assert run("export", folder, "--to", "safetensors", *MODEL, "--out", tmp_path / "b", "--quiet").shown == ""


def test_what_is_refused(run: Snows, folder: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out")
    assert_error(run("export", folder, "--to", "tflite", *MODEL, *out), 2, "'tflite' is not known; expected onnx,")
    assert_error(run("export", folder, "--to", "onnx", *out), 1, "code that a folder names is not run; give the model")
    assert_error(run("export", tmp_path, "--to", "onnx", *MODEL, *out), 1, "cannot be used: there is no")
    words = ("export", folder, "--to", "safetensors", *MODEL, *out)
    assert run(*words, "--quiet").status == 0
    assert_error(run(*words), 1, "exists; choose another folder, or say that it may be replaced (--force)")
    assert run(*words, "--quiet", "--force").status == 0
