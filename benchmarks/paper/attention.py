"""Attention maps of the last block at 2:4: how far they are from those of the dense network."""

from __future__ import annotations

from functools import partial

import torch
from sections import Row, Section
from torch import Tensor, nn

import snows
from snows.evaluation.attention import attention_of

from .setting import RECIPES, Entry, Setting
from .tables import table

_SAMPLES = 1000
_IMAGES = 100
_LAYERS = ["qkv", "out", "mlp"]
_WORDS = {"alone": "magnitude mask", "paper": "SNOWS, the paper's algorithm", "snows": "SNOWS, default"}


def rows(setting: Setting) -> Section:
    for name in ("alone", *RECIPES):
        yield {"network": "vit", "layers": ",".join(_LAYERS), "recipe": name}, partial(_measure, setting, name)


def _measure(setting: Setting, name: str) -> Row:
    dense, recipe = setting.network("vit"), setting.recipe(name)
    pruned = snows.prune(
        dense, setting.calibration("vit", _SAMPLES), "2:4", layers=_LAYERS, recipe=recipe,
        solver=None if recipe is None else "newton", progress=False,
    ).model  # fmt: skip
    images = setting.test("vit")[0][: 4 if setting.quick else _IMAGES].to(setting.device)
    return {"images": len(images), "distance": round(distance(dense, pruned, images), 4)}


def distance(dense: nn.Module, pruned: nn.Module, images: Tensor) -> float:
    """Half the sum of absolute differences over all patches, mean of heads and images: 0 to 1."""
    pairs = zip(attention_of(dense, images), attention_of(pruned, images), strict=True)
    return float(torch.stack([(a - b).abs().sum((1, 2)).mean() / 2 for a, b in pairs]).mean())


def make_table(found: list[Row]) -> str:
    body = [[_WORDS[row["recipe"]], f"{row['distance']:.3f}"] for row in found]
    return table(["weights", "distance from the dense network's maps"], body)


ENTRY = Entry("attention", "Figure “Attention maps”", rows, minutes=3, gib=80, table=make_table)
