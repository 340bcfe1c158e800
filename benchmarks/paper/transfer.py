"""Do the features still serve other tasks? A linear classifier on CIFAR-10 and CIFAR-100, epoch by epoch.

Only the classifier is trained, on the features of the dense network, of the magnitude mask and of SNOWS.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sections import Row, Section
from torch import Tensor, nn

import snows
from snows.data.sources import read_npz

from .drawing import Line, line_chart
from .setting import Entry, Setting
from .tables import table

_EPOCHS, _BATCH, _RATE = 30, 100, 1e-3
_TASKS = ("cifar10", "cifar100")
_NETWORKS = {"dense": "dense", "alone": "magnitude", "snows": "SNOWS"}
_TRAIN, _TEST = 3000, 2000


def rows(setting: Setting) -> Section:
    pruned: dict[str, nn.Module] = {}
    for task in setting.choose(_TASKS, ("cifar10",)):
        for name in _NETWORKS:

            def measure(task: str = task, name: str = name) -> Row:
                if name not in pruned:
                    pruned[name] = _network(setting, name)
                train, labels, test, test_labels = (part.to(setting.device) for part in _task(setting, task))
                known, new = (_features(pruned[name], x) for x in (train, test))
                return {"top1": _train_classifier(known, labels, new, test_labels, 3 if setting.quick else _EPOCHS)}

            yield {"task": task, "network": name}, measure


def _network(setting: Setting, name: str) -> nn.Module:
    dense = setting.network("vit")
    if name == "dense":
        return dense
    x = setting.calibration("vit", 1000)
    solver = None if name == "alone" else "newton"
    layers = ["qkv", "out", "mlp"]
    return snows.prune(
        dense, x, "2:4", layers=layers, recipe=setting.recipe("snows"), solver=solver, progress=False  # type: ignore[arg-type]
    ).model  # fmt: skip


def _task(setting: Setting, task: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    half = ((0.5,) * 3, (0.5,) * 3)
    if setting.quick:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(40, 3, 32, 32, generator=generator), torch.arange(40) % 2
        return x[:20], y[:20], x[20:], y[20:]
    if task == "cifar10":
        train, labels = read_npz(setting.shared / "data" / "cifar10_train5k.npz", *half)
        test, test_labels = read_npz(setting.shared / "data" / "cifar10_test.npz", *half)
        assert labels is not None
        assert test_labels is not None
    else:
        import numpy as np

        with np.load(setting.shared / "data" / "cifar100.npz") as archive:
            arrays = [torch.from_numpy(archive[key]) for key in ("x_train", "y_train", "x_test", "y_test")]
        train, test = (a.permute(0, 3, 1, 2).float() / 127.5 - 1 for a in (arrays[0], arrays[2]))
        labels, test_labels = arrays[1].long(), arrays[3].long()
    return train[:_TRAIN], labels[:_TRAIN], test[:_TEST], test_labels[:_TEST]


@torch.no_grad()
def _features(model: nn.Module, x: Tensor) -> Tensor:
    """What the classifier reads, for images enlarged to 224 pixels."""
    found: list[Tensor] = []
    handle = model.head.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0]))
    for part in x.split(_BATCH):
        model(F.interpolate(part, size=224, mode="bicubic"))
    handle.remove()
    return torch.cat(found)


def _train_classifier(known: Tensor, labels: Tensor, new: Tensor, new_labels: Tensor, epochs: int) -> list[float]:
    """Top-1 on the test images after each epoch, in percent."""
    generator = torch.Generator().manual_seed(0)
    classifier = nn.Linear(known.shape[1], int(labels.max()) + 1).to(known.device)
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    optimizer = torch.optim.Adam(classifier.parameters(), lr=_RATE)
    accuracies = []
    for _ in range(epochs):
        for part in torch.randperm(len(known), generator=generator).to(known.device).split(_BATCH):
            optimizer.zero_grad()
            F.cross_entropy(classifier(known[part]), labels[part]).backward()
            optimizer.step()
        with torch.no_grad():
            right = (classifier(new).argmax(1) == new_labels).double().mean()
        accuracies.append(round(100 * float(right), 2))
    return accuracies


def draw(found: list[Row]) -> dict[str, str]:
    figures = {}
    for task in dict.fromkeys(row["task"] for row in found):
        lines = [
            Line(_NETWORKS[row["network"]], list(range(1, len(row["top1"]) + 1)), row["top1"])
            for row in found
            if row["task"] == task
        ]
        figures[f"transfer-{task}"] = line_chart(f"ViT-Ti on {task}: classifier alone", lines, "epoch", "top-1, %")
    return figures


def _table(found: list[Row]) -> str:
    by = {(row["task"], row["network"]): row["top1"][-1] for row in found}
    tasks = dict.fromkeys(row["task"] for row in found)
    return table(
        ["top-1 after the last epoch", *_NETWORKS.values()], [[t, *(by.get((t, n)) for n in _NETWORKS)] for t in tasks]
    )


ENTRY = Entry("transfer", "Figure “Fine-tuning the classifier layer”", rows, minutes=3, gib=20, draw=draw, table=_table)
