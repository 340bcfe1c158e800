"""What the tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

MODEL, DATA = ("prune", "net.py:model"), ("--data", "net.py:calibration")
PRUNE = (*MODEL, *DATA, "--recipe", "fast.json")
FILES = {
    "model.safetensors", "masks.safetensors", "probe.safetensors", "report.json", "report.html", "recipe.json",
    "manifest.json",
}  # fmt: skip


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
