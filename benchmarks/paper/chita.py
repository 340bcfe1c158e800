"""Run-time and accuracy beside CHITA, at a sparsity of 0.7."""

from __future__ import annotations

from functools import partial

from sections import Row, Section

from .setting import RECIPES, Entry, Setting
from .tables import cost, table

_SAMPLES = {"resnet20": 1000, "mobilenet": 1000, "resnet20_cifar100": 500}


def rows(setting: Setting) -> Section:
    cells = [("chita", "alone")] + [("magnitude", recipe) for recipe in RECIPES]
    for network in setting.choose(list(_SAMPLES), ["resnet20"]):
        for mask, name in cells:
            measure = partial(setting.prune, network, "0.7", setting.recipe(name), _SAMPLES[network], mask)
            yield {"network": network, "mask": mask, "recipe": name}, measure


_REPORTED = {  # accuracy and minutes in the paper
    ("resnet20", "chita"): "84.1, 2.23 min",
    ("resnet20", "magnitude"): "90.0, 0.56 min",
    ("mobilenet", "chita"): "59.4, 16.82 min",
    ("mobilenet", "magnitude"): "61.1, 5.56 min",
    ("resnet20_cifar100", "chita"): "ResNet50: 73.6, 231.20 min",
    ("resnet20_cifar100", "magnitude"): "ResNet50: 75.7, 9.66 min",
}


def make_table(found: list[Row]) -> str:
    words = {"alone": "CHITA", "paper": "SNOWS, the paper's algorithm", "snows": "SNOWS, default"}
    body = [[r["network"], words[r["recipe"]], _REPORTED[r["network"], r["mask"]], cost(r)] for r in found]
    return table(["network", "method", "paper", "here"], body)


ENTRY = Entry("chita", "Table “Performance versus run-time”", rows, minutes=12, gib=80, table=make_table)
