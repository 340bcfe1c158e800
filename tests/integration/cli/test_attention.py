"""`snows attention`: pictures of a result, and results that it cannot show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from snows.cli.commands.attentions import _networks
from tests.transformers import Vision, build

from ..conftest import Snows, assert_error
from .helpers import PRUNE

FILE = """
from tests.transformers import Vision, build, images
def model():
    return build(Vision)
def data():
    return images(24)
"""
VISION = ("vit.py:model", "--data", "vit.py:data")


@pytest.fixture(autouse=True)
def vision(here: None) -> None:
    Path("vit.py").write_text(FILE)


def pruned(run: Snows, out: Path, *words: str) -> Path:
    assert run("prune", *VISION, "--recipe", "fast.json", "--out", out, "--quiet", *words).status == 0
    return out


def test_the_networks_of_a_picture(run: Snows, tmp_path: Path) -> None:
    folder = pruned(run, tmp_path / "out", "--pattern", "2:4")
    assert "Saved to" in run("attention", *VISION, "--pruned", folder, "--out", tmp_path / "maps.png").shown
    assert (tmp_path / "maps.png").read_bytes().startswith(b"\x89PNG")
    dense = build(Vision)
    networks = _networks(dense, folder)
    assert list(networks) == ["dense", "mask only", "re-adjusted"]
    name = "blocks.0.mlp.0.weight"
    weight, masked, readjusted = (network.get_parameter(name) for network in networks.values())
    kept = readjusted != 0
    assert torch.equal(masked, weight * kept)
    assert not torch.equal(masked, readjusted)


def test_masks_of_another_model_are_refused(run: Snows, tmp_path: Path) -> None:
    assert run(*PRUNE, "--out", tmp_path / "out", "--quiet").status == 0
    refused = run("attention", *VISION, "--pruned", tmp_path / "out", "--out", tmp_path / "maps.png")
    assert_error(refused, 1, "out cannot be used: ")


def test_masks_of_permuted_channels_are_refused(run: Snows, tmp_path: Path) -> None:
    folder = pruned(run, tmp_path / "out", "--pattern", "2:4", "--permute")
    refused = run("attention", *VISION, "--pruned", folder, "--out", tmp_path / "maps.png")
    assert_error(refused, 1, "out was pruned with --permute, which re-orders channels")
