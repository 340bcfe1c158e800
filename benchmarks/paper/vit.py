"""Vision transformers at 2:4: which layers are pruned, magnitude alone and with SNOWS."""

from __future__ import annotations

import time
from functools import partial

import torch
from networks import ViT
from sections import Row, Section

import snows

from .setting import RECIPES, Entry, Setting
from .tables import by_recipe, table

_SAMPLES = 1000
_ROLES = ("qkv", "qkv,out,mlp", "mlp")
_SHAPES = {"vit-b": (768, 12, 12), "vit-l": (1024, 24, 16)}  # width, depth, heads; random weights: time and memory only
_SHAPE_ROWS = (("vit-b", "qkv", 3), ("vit-b", "qkv,out,mlp", 3), ("vit-l", "qkv", 4), ("vit-l", "mlp", 1))  # with K
_SHAPE_SAMPLES = 256


def rows(setting: Setting) -> Section:
    for roles in setting.choose(_ROLES, ("qkv", "mlp")):
        for name in ("alone", *RECIPES):
            measure = partial(setting.prune, "vit", "2:4", setting.recipe(name), _SAMPLES, layers=roles.split(","))
            yield {"network": "vit", "layers": roles, "recipe": name}, measure
    for shape, roles, horizon in setting.choose(_SHAPE_ROWS, ()):
        what = {"network": shape, "layers": roles, "recipe": "paper", "horizon": horizon}
        yield what, partial(_of_shape, setting, shape, roles, horizon)


def _of_shape(setting: Setting, shape: str, roles: str, horizon: int) -> Row:
    width, depth, heads = _SHAPES[shape]
    torch.manual_seed(0)
    model = ViT(width, depth, heads).eval().to(setting.device)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    x = setting.calibration("vit", _SHAPE_SAMPLES)
    began = time.perf_counter()
    recipe = RECIPES["paper"].replace(horizon=horizon)
    result = snows.prune(model, x, "2:4", layers=roles.split(","), recipe=recipe, progress=False)
    return {
        "seconds": round(time.perf_counter() - began, 1), "peak_memory_bytes": result.report.peak_memory_bytes,
        "samples": len(x),
    }  # fmt: skip


_REPORTED = {
    ("vit", "qkv"): "ViT-B 78.97 → 79.45 of 80.42; ViT-L 75.55 → 81.01 of 84.17",
    ("vit", "qkv,out,mlp"): "ViT-B 70.89 → 76.57 of 80.42",
    ("vit", "mlp"): "ViT-L 0.28 → 69.71 of 84.17",
}


def make_table(found: list[Row]) -> str:
    real = [row for row in found if row["network"] == "vit"]
    shapes = [row for row in found if row["network"] != "vit"]
    worth = by_recipe(real, ("network", "layers"), lambda row: f"{row['top1']:.2f} / {row['top5']:.2f}", _REPORTED)
    if not shapes:
        return worth
    head = ["shape, random weights", "layers", "K", "samples", "seconds", "peak memory, GiB"]
    body = [
        [r["network"], r["layers"], r["horizon"], r["samples"], r["seconds"], (r["peak_memory_bytes"] or 0) / 2**30]
        for r in shapes
    ]
    return worth + "\n" + table(head, body)


ENTRY = Entry("vit", "Table “Pruning ViT-B/16 and ViT-L/16”", rows, minutes=12, gib=80, table=make_table)
