"""The table of FLOPs."""

from __future__ import annotations

from functools import partial

from sections import Row, Section

import snows

from .setting import Entry, Setting
from .tables import table

_CASES = (("resnet20", "1:4"), ("resnet20", "2:4"), ("resnet50", "1:4"), ("resnet50", "2:4"), ("vit", "2:4"))


def rows(setting: Setting) -> Section:
    for network, pattern in setting.choose(_CASES, _CASES[:1]):
        yield {"network": network, "pattern": pattern}, partial(_flops, setting, network, pattern)


def _flops(setting: Setting, network: str, pattern: str) -> Row:
    roles = {"layers": ["qkv", "out", "mlp"]} if network == "vit" else {}
    model, x = setting.network(network), setting.calibration(network, 8)
    result = snows.prune(model, x, pattern, solver=None, progress=False, **roles)  # type: ignore[arg-type]
    return result.report.flops.to_dict()


_REPORTED = {  # the paper's ViT is ViT-B/16
    ("resnet20", "1:4"): 3.80,
    ("resnet20", "2:4"): 1.97,
    ("resnet50", "1:4"): 2.99,
    ("resnet50", "2:4"): 1.79,
    ("vit", "2:4"): 1.97,
}


def make_table(found: list[Row]) -> str:
    body = [
        [r["network"], r["pattern"], _REPORTED[r["network"], r["pattern"]], r["reduction"],
         r["reduction_without_attention"]]
        for r in found
    ]  # fmt: skip
    return table(["network", "pattern", "paper", "here", "without products of attention"], body)


ENTRY = Entry("flops", "Table “FLOPs and accuracy reduction”", rows, minutes=1, gib=4, table=make_table)
