"""What the words of a command line mean."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from snows import SnowsWarning
from snows.cli.request import Request
from snows.data import models

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)
KNOWN = ((0.5, 0.4, 0.3), (0.2, 0.2, 0.1))


def loaded(folder: Path, config: str = "") -> torch.Tensor:
    np.savez(folder / "pixels.npz", x=PIXELS)
    (folder / "c.toml").write_text(config)
    request = Request.read("timm:resnet18", f"npz:{folder / 'pixels.npz'}", None, 6, 0, folder / "c.toml", "cpu", True)
    found = request.data().calibration
    assert isinstance(found, torch.Tensor)
    return found.sort(0).values


def expected(mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    x = torch.from_numpy((PIXELS / 255 - np.array(mean)) / np.array(std)).permute(0, 3, 1, 2).float()
    return x.sort(0).values  # images are drawn in random order


def test_pixels_are_normalized_as_the_library_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "known_normalization", {"timm:resnet18": KNOWN}.get)
    with pytest.warns(SnowsWarning) as said:
        torch.testing.assert_close(loaded(tmp_path), expected(*KNOWN))
    assert [str(each.message) for each in said] == [
        "no mean and std are given: pixels are normalized as timm:resnet18 was trained (mean 0.5, 0.4, 0.3; std 0.2, "
        "0.2, 0.1); --config sets others in [data]"
    ]


def test_what_the_user_gives_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "known_normalization", {"timm:resnet18": KNOWN}.get)
    found = loaded(tmp_path, "[data]\nmean = 0.1\nstd = 0.9\n")
    torch.testing.assert_close(found, expected((0.1,), (0.9,)))


def test_what_nobody_knows_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "known_normalization", lambda name: None)
    with pytest.warns(SnowsWarning, match=r"no mean and std are given: pixels are only scaled to \[0, 1\]"):
        torch.testing.assert_close(loaded(tmp_path), expected((0.0,), (1.0,)))
