"""The embedded default: a ResNet20 trained on Fashion-MNIST, and a few thousand of its images.

Made by scripts/train_embedded.py. The images are Fashion-MNIST's (MIT licence, see LICENSE-fashion-mnist.txt).
"""

from __future__ import annotations

from importlib import resources

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from .resnet20 import ResNet20

MODEL = "resnet20-fashion"
DATA = "fashion"
_MEAN, _STD = 0.2860, 0.3530  # of the 60,000 training images


def model(pretrained: bool = True) -> ResNet20:
    network = ResNet20(in_channels=1)
    if pretrained:
        weights = resources.files(__package__).joinpath("resnet20_fashion.safetensors").read_bytes()
        network.load_state_dict(load(weights), strict=False)  # the file has no batch counters
    return network.eval()


def images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """3,000 training images with labels, then 2,000 test images with labels; normalized."""
    with resources.files(__package__).joinpath("fashion_subset.npz").open("rb") as file:
        archive = np.load(file)
        arrays = [archive[name] for name in ("calibration_x", "calibration_y", "test_x", "test_y")]
    x, y, test_x, test_y = (torch.from_numpy(array) for array in arrays)
    return _normalize(x), y.long(), _normalize(test_x), test_y.long()


def _normalize(pixels: Tensor) -> Tensor:
    return ((pixels.float() / 255 - _MEAN) / _STD).unsqueeze(1)
