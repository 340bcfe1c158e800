"""Tiny networks, one for each thing that a graph can have. All are random, in eval mode and in float64.

Every counted operation (convolution, linear, activation, layer norm, attention) is a module of its own, so that
an oracle can watch it with forward hooks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from snows.graph import Graph, capture


class Sequential(nn.Sequential):
    """Under a name of our own, to be seen in messages."""


def random_statistics(model: nn.Module) -> None:
    """Batch norms as after training: statistics and affine parameters away from 0 and 1."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)


def mlp() -> nn.Module:
    return Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def conv_bn() -> nn.Module:
    return Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.stem_relu = nn.ReLU()
        self.conv1 = nn.Conv2d(4, 4, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4)
        self.shortcut = nn.Sequential(nn.Conv2d(4, 4, 1, stride=2, bias=False), nn.BatchNorm2d(4))
        self.relu2 = nn.ReLU(inplace=True)
        self.last = nn.Conv2d(4, 4, 1)
        self.last_relu = nn.ReLU()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem_relu(self.stem(x))
        y = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        y += self.shortcut(x)
        return self.head(self.last_relu(self.last(self.relu2(y))).mean((2, 3)))


def grouped() -> nn.Module:
    return Sequential(
        nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, groups=2, padding=1), nn.LeakyReLU(0.1),
        nn.Conv2d(4, 8, 1, groups=2, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2),
    )  # fmt: skip


def depthwise() -> nn.Module:
    return Sequential(
        nn.Conv2d(2, 4, 1), nn.ReLU6(), nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=4, bias=False),
        nn.BatchNorm2d(4), nn.ReLU6(), nn.Conv2d(4, 4, 1), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def conv1d() -> nn.Module:
    return Sequential(
        nn.Conv1d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv1d(4, 4, 3, stride=2, padding=2, dilation=2),
        nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(16, 2),
    )  # fmt: skip


def conv3d() -> nn.Module:
    return Sequential(
        nn.Conv3d(1, 4, 2), nn.ReLU(), nn.Conv3d(4, 4, 2, stride=(1, 2, 1), padding=(1, 0, 1), bias=False),
        nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, 2, 1), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(2, 2),
    )  # fmt: skip


def padded() -> nn.Module:
    with warnings.catch_warnings():  # torch says once in a process that it pads by copying: let it be here
        warnings.simplefilter("ignore")
        nn.Conv2d(1, 1, 2, padding="same")(torch.zeros(1, 1, 2, 2))
    return Sequential(
        nn.Conv2d(2, 4, 3, padding="same", dilation=2), nn.ReLU(),
        nn.Conv2d(4, 4, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(2, 1)), nn.ReLU(),
        nn.Conv2d(4, 4, 2, padding="same", bias=False), nn.ReLU(), nn.Conv2d(4, 4, 2, padding="valid"),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip


class Attention(nn.Module):
    """A pre-norm transformer block with packed query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.norm1 = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.norm3 = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.mlp(self.norm2(x))
        return self.head(self.norm3(x).mean(1))


class SharedReLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.second = nn.Linear(8, 8, bias=False)
        self.third = nn.Linear(8, 2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.relu(self.second(self.relu(self.first(x)))))


class Tied(nn.Module):
    """One linear used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.twice = nn.Linear(4, 4)
        self.between = nn.Linear(4, 4)
        self.relu = nn.ReLU()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.twice(self.relu(self.first(x))))
        return self.head(self.relu(self.twice(self.relu(self.between(x)))))


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU())
        self.left = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        self.right = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.left(x), self.right(x)


class DictOutput(TwoOutputs):
    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        left, right = super().forward(x)
        return {"logits": left, "features": right}


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(2, 4, 2)
        self.number = nn.Linear(3, 4)
        self.relu = nn.ReLU()
        self.joint = nn.Linear(8, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, image: Tensor, number: Tensor) -> Tensor:
        image = self.relu(self.image(image)).mean((2, 3))
        return self.head(self.relu(self.joint(torch.cat([image, self.relu(self.number(number))], 1))))


class Gated(nn.Module):
    """Squeeze and excitation: a product of two values that both vary, with smooth activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3)
        self.act = nn.Hardswish()
        self.conv = nn.Conv2d(4, 4, 2)
        self.squeeze = nn.Conv2d(4, 4, 1)
        self.gate = nn.Sigmoid()
        self.out = nn.Conv2d(4, 4, 1)
        self.silu = nn.SiLU()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.act(self.stem(x)))
        x = x * self.gate(self.squeeze(x.mean((2, 3), keepdim=True)))
        return self.head(self.silu(self.out(x)).mean((2, 3)))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "mlp": (mlp, lambda n: torch.randn(n, 6)),
    "conv-bn": (conv_bn, lambda n: torch.randn(n, 2, 4, 4)),
    "residual": (Residual, lambda n: torch.randn(n, 2, 4, 4)),
    "grouped": (grouped, lambda n: torch.randn(n, 2, 4, 4)),
    "depthwise": (depthwise, lambda n: torch.randn(n, 2, 4, 4)),
    "conv1d": (conv1d, lambda n: torch.randn(n, 2, 7)),
    "conv3d": (conv3d, lambda n: torch.randn(n, 1, 3, 4, 3)),
    "padded": (padded, lambda n: torch.randn(n, 2, 5, 4)),
    "attention": (Attention, lambda n: torch.randn(n, 3, 3)),
    "gated": (Gated, lambda n: torch.randn(n, 2, 5, 5)),
    "shared-relu": (SharedReLU, lambda n: torch.randn(n, 5)),
    "tied": (Tied, lambda n: torch.randn(n, 5)),
    "two-outputs": (TwoOutputs, lambda n: torch.randn(n, 5)),
    "dict-output": (DictOutput, lambda n: torch.randn(n, 5)),
    "two-inputs": (TwoInputs, lambda n: {"image": torch.randn(n, 2, 3, 3), "number": torch.randn(n, 3)}),
}
CURVED = ("attention", "gated")  # those with smooth nonlinearities


def make(name: str) -> nn.Module:
    """A fresh network: the same weights each time."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model = NETWORKS[name][0]().double().eval()
        random_statistics(model)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            if parameter.ndim == 1:  # biases away from zero, affine norms away from one
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model


def example(name: str, samples: int, seed: int = 2) -> Any:
    """Inputs: a tensor, or a dict of tensors."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = NETWORKS[name][1](samples)
    return {key: value.double() for key, value in made.items()} if isinstance(made, dict) else made.double()


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})


@cache
def captured(name: str) -> tuple[nn.Module, Graph]:
    """Capturing takes a second or more: once a session for each network. Neither is to be changed."""
    model = make(name)
    return model, capture(model, *call_arguments(example(name, 4)))


def prunable(name: str) -> list[str]:
    """Layers whose weight can be pruned, by parameter name, without capturing anything."""
    refused = {"twice.weight"}  # used twice
    model = make(name)
    layers = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    found = []
    for module_name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            found.append(f"{module_name}.in_proj_weight")
        if isinstance(module, layers) and f"{module_name}.weight" not in refused:
            found.append(f"{module_name}.weight")
    return found
