"""Retraining with frozen masks: ResNet20 on the whole of CIFAR-10, 90 epochs.

The images are in the folder that `benchmarks/retrain.py pack` writes, here data/cifar10-packed of the shared folder.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

from retrain import HELD_OUT, read
from sections import Row, Section
from torch import Tensor

import snows
from snows.data import embedded

from .setting import Entry, Setting
from .tables import table

_SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9)
_CELLS = (("falcon", "alone"), ("magnitude", "paper"), ("magnitude", "snows"), ("falcon", "snows"))
_TRAINING = 50_000
_CALIBRATION = 1000
_REPORTED = {  # of the paper: FALCON, and SNOWS from magnitude masks; before and after retraining
    0.5: ("90.87 → 91.07", "92.28 → 92.32"),
    0.6: ("89.67 → 90.58", "91.90 → 92.13"),
    0.7: ("84.42 → 89.64", "90.87 → 91.85"),
    0.8: ("65.17 → 87.59", "87.82 → 91.06"),
    0.9: ("19.14 → 81.60", "64.80 → 87.69"),
}


def rows(setting: Setting) -> Section:
    for sparsity in setting.choose(_SPARSITIES, (0.9,)):
        for mask, name in setting.choose(_CELLS, _CELLS[1:3]):
            what = {"network": "resnet20", "sparsity": sparsity, "mask": mask, "recipe": name}
            yield what, partial(_measure, setting, str(sparsity), mask, name)


def _measure(setting: Setting, sparsity: str, mask: str, name: str) -> Row:
    train, labels, test, test_labels = _images(setting)
    dense, recipe = setting.network("resnet20"), setting.recipe(name)
    options: dict[str, Any] = {**setting.chosen_layers, "recipe": recipe, "progress": False}
    if recipe is None:
        options["solver"] = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", snows.SnowsWarning)  # at 0.9 masks remove some outputs whole
        pruned = snows.prune(dense, train[: setting.count(_CALIBRATION)], sparsity, mask=mask, **options)
    held_out = min(HELD_OUT, len(train) // 5)
    retrained = snows.retrain(
        pruned, (train[:-held_out], labels[:-held_out]), held_out=(train[-held_out:], labels[-held_out:]),
        epochs=1 if setting.quick else 90, crop=4, flip=True, progress=False,
    )  # fmt: skip
    found = [snows.evaluate(model, test, test_labels)["top1"] for model in (dense, pruned.model, retrained.model)]
    return dict(zip(("dense", "before", "after"), (round(100 * top1, 2) for top1 in found), strict=True))


def _images(setting: Setting) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images with labels, then test images with labels."""
    if setting.quick:
        x, y, test, test_labels = embedded.images()
        return x[:200], y[:200], test[:200], test_labels[:200]
    x, y = read(setting.shared / "data" / "cifar10-packed")
    return x[:_TRAINING], y[:_TRAINING], x[_TRAINING:], y[_TRAINING:]


def make_table(found: list[Row]) -> str:
    words = {"alone": "mask alone", "paper": "SNOWS, the paper's algorithm", "snows": "SNOWS, default"}
    body = []
    for row in found:
        theirs = {("falcon", "alone"): 0, ("magnitude", "paper"): 1}.get((row["mask"], row["recipe"]))
        reported = None if theirs is None else _REPORTED[row["sparsity"]][theirs]
        here = f"{row['before']:.2f} → {row['after']:.2f}"
        body.append([f"{row['sparsity']}", row["mask"], words[row["recipe"]], reported, here])
    return table(["sparsity", "mask", "weights", "paper", "here"], body)


ENTRY = Entry("retraining", "Table “Retraining experiments”", rows, minutes=55, gib=10, table=make_table)
