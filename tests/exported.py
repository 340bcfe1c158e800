"""Small saved results to export, and the networks that they are of."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import snows

QUICK = snows.Recipe(horizon=1, sweeps=1, cg_steps=2)


def seeded(network: nn.Module) -> nn.Module:
    """The same weights each time, and statistics of batch norms away from 0 and 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in network.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.4 + (0.8 if tensor.ndim == 1 else -0.2))
    return network.eval()


def images() -> nn.Module:
    """Convolutions, batch norms, a depthwise one, and two linear layers of which one fits 2:4 kernels."""
    return seeded(
        nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU6(),
            nn.Conv2d(8, 64, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 32), nn.GELU(),
            nn.Linear(32, 3),
        )
    )  # fmt: skip


def calibration() -> torch.Tensor:
    return torch.randn(16, 4, 10, 10, generator=torch.Generator().manual_seed(1))


def save(folder: Path, network: nn.Module, samples: torch.Tensor, pattern: object = "2:4") -> Path:
    """A saved result of a quick run on all layers."""
    result = snows.prune(network, samples, pattern, layers="*", recipe=QUICK, progress=False)
    return result.save(folder)


def file_names(folder: Path) -> list[str]:
    """All files in a folder and its folders, by their path inside."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
