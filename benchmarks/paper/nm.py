"""The table of N:M sparsity: masks of OBC, SparseGPT and magnitude, each alone and with SNOWS."""

from __future__ import annotations

from functools import partial

from sections import Row, Section

from .setting import RECIPES, Entry, Setting
from .tables import accuracy, by_recipe

# Of the paper: the mask alone and with SNOWS. Its CIFAR-100 column is a ResNet50, which cannot be had.
_REPORTED = {
    ("resnet20", "1:4", "obc"): "76.77 → 89.09 of 92.58",
    ("resnet20", "1:4", "sparsegpt"): "11.06 → 86.10 of 92.58",
    ("resnet20", "1:4", "magnitude"): "10.99 → 87.82 of 92.58",
    ("resnet20", "2:4", "obc"): "90.98 → 91.86 of 92.58",
    ("resnet20", "2:4", "sparsegpt"): "86.05 → 91.94 of 92.58",
    ("resnet20", "2:4", "magnitude"): "63.45 → 91.88 of 92.58",
    ("resnet20_cifar100", "1:4", "obc"): "ResNet50: 69.79 → 76.05 of 77.40",
    ("resnet20_cifar100", "1:4", "sparsegpt"): "ResNet50: 8.27 → 73.66 of 77.40",
    ("resnet20_cifar100", "1:4", "magnitude"): "ResNet50: 9.45 → 75.87 of 77.40",
    ("resnet20_cifar100", "2:4", "obc"): "ResNet50: 77.03 → 77.11 of 77.40",
    ("resnet20_cifar100", "2:4", "sparsegpt"): "ResNet50: 74.10 → 77.10 of 77.40",
    ("resnet20_cifar100", "2:4", "magnitude"): "ResNet50: 70.76 → 77.24 of 77.40",
    ("resnet50", "1:4", "obc"): "46.29 → 66.33 of 75.71",
    ("resnet50", "1:4", "sparsegpt"): "1.61 → 49.32 of 75.71",
    ("resnet50", "1:4", "magnitude"): "62.75 of 75.71",
    ("resnet50", "2:4", "obc"): "73.74 → 73.87 of 75.71",
    ("resnet50", "2:4", "sparsegpt"): "69.46 → 73.59 of 75.71",
    ("resnet50", "2:4", "magnitude"): "63.45 → 73.97 of 75.71",
}

_SAMPLES = {"resnet20": 3000, "resnet20_cifar100": 3000, "resnet50": 1000}


def rows(setting: Setting) -> Section:
    for network in setting.choose(list(_SAMPLES), ["resnet20"]):
        for pattern in setting.choose(["1:4", "2:4"], ["1:4"]):
            for mask in ("obc", "sparsegpt", "magnitude"):
                for name in ("alone", *RECIPES):
                    measure = partial(setting.prune, network, pattern, setting.recipe(name), _SAMPLES[network], mask)
                    yield {"network": network, "pattern": pattern, "mask": mask, "recipe": name}, measure


def make_table(found: list[Row]) -> str:
    return by_recipe(found, ("network", "pattern", "mask"), accuracy, _REPORTED)


ENTRY = Entry("nm", "Table “Top-1 with N:M masks”", rows, minutes=30, gib=80, table=make_table)
