"""Every script in examples/ runs as it is, here on less data, and shows what it is there to show."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

import snows
from tests.libraries import library

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore::snows.SnowsWarning")  # of samples that are so few


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """Runs a script with arguments in a folder of its own; gives what it printed, line by line."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with torch.random.fork_rng():
            torch.manual_seed(0)
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def figure(line: str, name: str) -> float:
    """A number out of a printed dictionary."""
    return float(line.split(f"'{name}': ")[1].split(",")[0].rstrip("}"))


def test_image_folder(run) -> None:  # type: ignore[no-untyped-def]
    dense, sparse = run("image_folder.py", "--images", "80")
    assert figure(dense, "top1") > 0.85
    assert figure(sparse, "agreement") > 0.85
    assert snows.verify("pruned-resnet").ok


def test_segmentation(run) -> None:  # type: ignore[no-untyped-def]
    dense, masked, sparse = (figure(line, "miou") for line in run("segmentation.py", "100", "40"))
    assert dense > 0.6
    assert sparse > max(masked, 0.85 * dense)


def test_language_model(run) -> None:  # type: ignore[no-untyped-def]
    library("transformers")
    dense, masked, sparse = (float(line.split()[-1]) for line in run("language_model.py", "--steps", "150"))
    assert dense < 0.95 * masked  # a network that has learned nothing yet does not suffer from a mask
    assert sparse < 0.95 * masked


def test_readjust(run) -> None:  # type: ignore[no-untyped-def]
    dense, came, adjusted, same = run("readjust.py", "--samples", "48")
    assert same == "the same zeros: True"
    assert figure(came, "top1") < figure(adjusted, "top1") <= figure(dense, "top1") + 0.01


def test_frozen_masks(run) -> None:  # type: ignore[no-untyped-def]
    lines = run("frozen_masks.py", "--samples", "64", "--epochs", "1", "--sparsity", "0.7")
    assert "weights that grew back: 0" in lines
    network = torch.load("trained.pt", weights_only=True)
    share = torch.cat([w.flatten() == 0 for n, w in network.items() if n.startswith("layer1.0.conv")]).float().mean()
    assert 0.2 < share < 0.95


def test_timm_vit(run) -> None:  # type: ignore[no-untyped-def]
    library("timm")
    lines = run("timm_vit.py", "--count", "16", "--size", "32")
    assert sum(line.split()[0] in ("dense", "sparse") for line in lines) == 2
    assert snows.load_masks("pruned-vit")


def test_all_of_them_are_tested_and_short() -> None:
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert len(scripts) == 6
    for script in scripts:
        assert f'run("{script.name}"' in Path(__file__).read_text(encoding="utf-8")
        assert len(script.read_text(encoding="utf-8").splitlines()) <= 60, script.name
