"""The paper, re-run: every entry works, scaled down; settings and page are right."""

from __future__ import annotations

import importlib
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from snows.data.embedded.resnet20 import ResNet20

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def paper(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paper", *map(str, arguments)]
    return subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=False)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Modules of benchmarks/paper by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    loaded = set(sys.modules)
    yield lambda name: importlib.import_module(f"paper.{name}")
    for name in set(sys.modules) - loaded:
        if name.partition(".")[0] == "paper" or (BENCHMARKS / f"{name}.py").is_file():
            del sys.modules[name]


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


def test_several_processes_share_the_rows(tmp_path: Path) -> None:
    done = paper("--quick", "nm", "--jobs", 2, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "nm.json").read_text())["rows"]
    assert sorted((row["mask"], row["recipe"]) for row in rows) == sorted(
        itertools.product(("obc", "sparsegpt", "magnitude"), ("alone", "paper", "snows"))
    )
    assert not any("seconds" in row for row in rows)
    assert [path.name for path in tmp_path.iterdir()] == ["nm.json"]


def test_an_unknown_entry_is_named(tmp_path: Path) -> None:
    refused = paper("table7", "--out", tmp_path)
    assert refused.returncode == 2
    assert "table7: no such entry" in refused.stderr


def test_the_page_is_what_the_results_say(module: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """It has a place for every entry, and tables and figures are those of the files."""
    docs = ROOT / "docs"
    text = (docs / "paper.md").read_text()
    assert all(f"<!-- {name}:begin -->\n" in text for name in module("entries").ENTRIES)
    shutil.copy(docs / "paper.md", tmp_path)
    module("page").write(BENCHMARKS / "results" / "paper", tmp_path)
    assert (tmp_path / "paper.md").read_text() == text
    drawn, there = ({path.name: path.read_text() for path in place.glob("paper/*.svg")} for place in (tmp_path, docs))
    assert drawn == there


def test_flops_are_those_of_the_paper(module: Callable[[str], ModuleType]) -> None:
    """Shortcuts stay dense there; ResNet50 on CIFAR-100 has the usual shape for small images."""
    flops = module("flops")
    for model, pattern, reported in (
        (ResNet20(), "1:4", 3.80),
        (flops.resnet50_cifar(), "1:4", 3.13),
    ):
        assert flops.count(model.eval(), torch.randn(4, 3, 32, 32), pattern).reduction == pytest.approx(
            reported, rel=2e-3
        )


def test_the_toy_problem_takes_the_paper_s_number_of_steps(module: Callable[[str], ModuleType]) -> None:
    found = module("toy")._measure()
    assert found["sgd"]["needed"] == 1375
    assert found["newton"] == {"needed": 1, "steps": [0, 1], "points": [[1.0, 1.0], [0.0, 0.0]]}


def test_the_distance_of_attention_maps(module: Callable[[str], ModuleType]) -> None:
    attention, model = module("attention"), module("setting")._small_vit().eval()
    images = torch.randn(2, 3, 224, 224)
    assert attention.distance(model, model, images) == 0
    other = module("setting")._small_vit().eval()
    with torch.no_grad():
        other.blocks[-1].attn.qkv.weight.mul_(50)
    assert 0.1 < attention.distance(model, other, images) < 1


@pytest.mark.slow
def test_all_entries_run_scaled_down(tmp_path: Path, module: Callable[[str], ModuleType]) -> None:
    done = paper("--quick", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in tmp_path.glob("*.json")} == set(module("entries").ENTRIES)
    bound = json.loads((tmp_path / "bound.json").read_text())["rows"]
    assert all(row["error"] <= row["bound"] for row in bound)
    figures = list(tmp_path.glob("*.svg"))
    assert figures
    assert all("prefers-color-scheme: dark" in figure.read_text() for figure in figures)
