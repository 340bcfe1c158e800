"""Saved results: small runs to save, and what a folder must hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file
from torch import nn

import snows
from snows.data.weights import read_state
from snows.reading import read_json
from snows.recipe import Recipe
from snows.results.manifest import file_facts, render_manifest

SAMPLES = 16
QUICK = snows.Recipe(horizon=2, sweeps=1, cg_steps=3)
FILES = {
    "model.safetensors", "masks.safetensors", "probe.safetensors", "report.json", "report.html", "recipe.json",
    "manifest.json",
}  # fmt: skip
FACTORY = """
from torch import nn
def make():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
"""


def quick(model: nn.Module, x: Any, pattern: Any = "2:4", **options: Any) -> snows.Result:
    return snows.prune(model, x, pattern, **{"recipe": QUICK, "progress": False, **options})


def strict(text: str) -> Any:
    """JSON as the standard has it, without NaN and Infinity."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def check_folder(folder: Path, pruned: snows.Result) -> None:
    """A dense folder holds exactly this result."""
    assert {path.name for path in folder.iterdir()} == FILES
    masks = read_state(folder / "masks.safetensors")
    assert set(masks) == set(pruned.masks)
    weights = load_file(folder / "model.safetensors")
    for name, mask in masks.items():
        assert mask.dtype == torch.bool
        assert torch.equal(mask, pruned.masks[name])
        assert not weights[name][~mask].any()
    assert Recipe.from_json((folder / "recipe.json").read_text(encoding="utf-8")) == pruned.recipe
    report = strict((folder / "report.json").read_text(encoding="utf-8"))
    assert report.pop("source") == pruned.source
    assert report == pruned.report.to_dict() == strict(pruned.report.to_json())


def sealed(folder: Path) -> Path:
    """The same folder with a manifest that fits its files: what is wrong now only shows in their contents."""
    versions = read_json(folder / "manifest.json")["versions"]
    files = {path.name: file_facts(path) for path in folder.iterdir() if path.name != "manifest.json"}
    (folder / "manifest.json").write_text(render_manifest(files, versions))
    return folder


def contents(folder: Path) -> dict[Path, bytes | None]:
    """All files and folders inside."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
