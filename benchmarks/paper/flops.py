"""The table of FLOPs. Networks other than ResNet20 have random weights: only shapes count."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from networks import ResNet50, ViT
from sections import Row, Section
from torch import Tensor, nn

import snows
from snows.graph.flops import FlopCount

from .setting import Entry, Setting
from .tables import table

_REPORTED = {
    ("resnet20", "1:4"): 3.80,
    ("resnet20", "2:4"): 1.97,
    ("resnet50", "1:4"): 2.99,
    ("resnet50", "2:4"): 1.79,
    ("resnet50, CIFAR-100", "1:4"): 3.13,
    ("resnet50, CIFAR-100", "2:4"): 1.83,
    ("vit-b", "2:4"): 1.97,
}


def rows(setting: Setting) -> Section:
    cases = list(_REPORTED)
    for network, pattern in setting.choose(cases, cases[:1]):
        yield {"network": network, "pattern": pattern}, partial(_flops, setting, network, pattern)


def _flops(setting: Setting, network: str, pattern: str) -> Row:
    if network in _SHAPES:
        make, pixels = _SHAPES[network]
        model, x = make().eval(), torch.randn(4, 3, pixels, pixels)
    else:
        model, x = setting.network(network), setting.calibration(network, 8)
    return count(model, x, pattern).to_dict()


def count(model: nn.Module, x: Tensor, pattern: str) -> FlopCount:
    """All layers pruned but the first, the classifier and 1x1 shortcuts, as in the paper."""
    result = snows.prune(model, x, pattern, exclude="*downsample*", solver=None, progress=False)
    return result.report.flops


def resnet50() -> nn.Module:
    """The stride is where torchvision has it: on the 3x3 convolution."""
    model = ResNet50()
    for stage in (model.layer2, model.layer3, model.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (1, 1), (2, 2)
    return model


def resnet50_cifar() -> nn.Module:
    """For 32-pixel images: the first convolution is 3x3 without stride, and nothing is pooled behind it."""
    model = resnet50()
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    model.fc = nn.Linear(2048, 100)
    return model


_SHAPES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet50": (resnet50, 224),
    "resnet50, CIFAR-100": (resnet50_cifar, 32),
    "vit-b": (partial(ViT, 768, 12, 12), 224),
}


def make_table(found: list[Row]) -> str:
    body = [
        [r["network"], r["pattern"], _REPORTED[r["network"], r["pattern"]], r["reduction"],
         r["reduction_without_attention"]]
        for r in found
    ]  # fmt: skip
    return table(["network", "pattern", "paper", "here", "without products of attention"], body)


ENTRY = Entry("flops", "Table “FLOPs and accuracy reduction”", rows, minutes=1, gib=4, table=make_table)
