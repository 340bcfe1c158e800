"""The trained networks of the benchmarks. Weights are read from a folder; none are part of this repository."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from snows.data.embedded.resnet20 import ResNet20
from snows.data.sources import read_npz


class Bottleneck(nn.Module):
    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        # The stride is on the first 1x1 convolution, as in the original paper and unlike torchvision.
        self.conv1 = nn.Conv2d(in_channels, channels, 1, stride, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, 4 * channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != 4 * channels:
            shortcut = nn.Conv2d(in_channels, 4 * channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * channels))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + shortcut)


class ResNet50(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = self._stage(64, 64, 3, 1)
        self.layer2 = self._stage(256, 128, 4, 2)
        self.layer3 = self._stage(512, 256, 6, 2)
        self.layer4 = self._stage(1024, 512, 3, 2)
        self.fc = nn.Linear(2048, 1000)

    @staticmethod
    def _stage(in_channels: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
        rest = [Bottleneck(4 * channels, channels, 1) for _ in range(blocks - 1)]
        return nn.Sequential(Bottleneck(in_channels, channels, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


class SameConv2d(nn.Conv2d):
    """TensorFlow's "SAME" padding of a 3x3 convolution: at stride 2 the odd row goes to the end."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 1, 0, 1) if self.stride[0] == 2 else (1, 1, 1, 1)))


def _unit(convolution: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(convolution, nn.BatchNorm2d(convolution.out_channels, eps=1e-3), nn.ReLU6(inplace=True))


class MobileNetV1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        plan = [(32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
        plan += [(512, 512, 1)] * 5 + [(512, 1024, 2), (1024, 1024, 1)]
        blocks: list[nn.Module] = [_unit(SameConv2d(3, 32, 3, 2, bias=False))]
        for inputs, outputs, stride in plan:
            depthwise = _unit(SameConv2d(inputs, inputs, 3, stride, groups=inputs, bias=False))
            pointwise = _unit(nn.Conv2d(inputs, outputs, 1, bias=False))
            blocks.append(nn.Sequential(depthwise, pointwise))
        self.features = nn.Sequential(*blocks)
        self.fc = nn.Linear(1024, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


class ViT(nn.Module):
    """A vision transformer for 224x224 images in patches of 16, with timm's names; ViT-Ti by default."""

    def __init__(self, width: int = 192, depth: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 197, width))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, 16, 16)})
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed["proj"](x).flatten(2).mT
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


HALF = (0.5, 0.5, 0.5)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
NETWORKS = {  # class, file, mean and standard deviation of the input
    "resnet20": (ResNet20, "resnet20_cifar10.safetensors", (HALF, HALF)),
    "resnet50": (ResNet50, "resnet50_imagenet.safetensors", IMAGENET),
    "mobilenet": (MobileNetV1, "mobilenet_v1_imagenet.safetensors", (HALF, HALF)),
    "vit": (ViT, "vit_tiny_imagenet.safetensors", (HALF, HALF)),
}


def resnet20() -> nn.Module:
    """For the command line: `benchmarks/networks.py:resnet20`."""
    return ResNet20()


def cifar10() -> tuple[Tensor, Tensor, Tensor]:
    """For the command line, as data: 5,000 training images, then the test images with labels."""
    shared = Path(os.environ.get("SNOWS_SHARED", "../shared"))
    mean, std = normalization("resnet20")
    calibration, _ = read_npz(shared / "data" / "cifar10_train5k.npz", mean, std)
    test, labels = read_npz(shared / "data" / "cifar10_test.npz", mean, std)
    assert labels is not None
    return calibration, test, labels


def load_network(name: str, shared: Path) -> nn.Module:
    make, file, _ = NETWORKS[name]
    model = make()
    state = {key: value.float() for key, value in load_file(shared / "checkpoints" / file).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert all(key.endswith("num_batches_tracked") for key in missing), missing
    return model.eval()


def normalization(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the network's inputs, per channel."""
    return NETWORKS[name][2]
