"""What every entry works on: networks, samples, a device; and what an entry is.

Scaled down (`quick`), every network is the embedded ResNet20, or a small vision transformer with random weights, on a
few images. The figures then mean nothing; the code is the same.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accuracy import DATA
from networks import ViT, load_network, normalization
from safetensors.torch import load_file
from sections import Row, Section
from torch import Tensor, nn

import snows
from snows.data import embedded
from snows.data.embedded.resnet20 import ResNet20
from snows.data.sources import read_npz
from snows.recipe import DEFAULT, PAPER, Recipe

RECIPES: dict[str, Recipe] = {"paper": PAPER, "snows": DEFAULT}

CIFAR100 = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
_QUICK_SAMPLES = 48
_QUICK_TEST = 200


@dataclass(frozen=True)
class Entry:
    """A table or figure of the paper. `rows` measures it, `draw` makes figures of the rows."""

    name: str
    title: str  # where it is in the paper
    rows: Callable[[Setting], Section]
    minutes: float  # about, on one H200
    gib: float  # of the device, at most
    draw: Callable[[list[Row]], dict[str, str]] | None = None  # file name without ending -> SVG
    table: Callable[[list[Row]], str] | None = None  # for docs/paper.md


@dataclass
class Setting:
    """Where networks and samples come from."""

    shared: Path
    device: str
    quick: bool = False
    memory: str | None = None  # of each of several processes; None: there is one

    def choose(self, full: Sequence[Any], quick: Sequence[Any]) -> Sequence[Any]:
        """The values of a row's key: all of the paper's, or a few."""
        return quick if self.quick else full

    def count(self, samples: int) -> int:
        return min(samples, _QUICK_SAMPLES) if self.quick else samples

    def recipe(self, name: str) -> Recipe | None:
        """By name; None for a mask alone. Scaled down, there is little of everything."""
        chosen = RECIPES.get(name)
        if chosen is None or not self.quick:
            return chosen
        last = 5 if chosen.finish_steps else 0
        return chosen.replace(horizon=3, sweeps=1, mask_steps=1, cg_steps=5, finish_steps=last)

    @property
    def chosen_layers(self) -> dict[str, Any]:
        """Of a residual network, as arguments of `prune`: all that the paper prunes, or scaled down the first few."""
        return {"layers": "layer1.*"} if self.quick else {"exclude": "*downsample*"}

    def network(self, name: str) -> nn.Module:
        if self.quick:
            model = _small_vit() if name == "vit" else embedded.model()
        elif name == "resnet20_cifar100":
            model = _cifar100_network(self.shared)
        else:
            model = load_network(name, self.shared)
        return model.eval().to(self.device)

    def calibration(self, name: str, samples: int) -> Tensor:
        if self.quick:
            x = torch.randn(_QUICK_SAMPLES, 3, 224, 224) if name == "vit" else embedded.images()[0]
        elif name == "resnet20_cifar100":
            x = _cifar100(self.shared, "train")[0]
        else:
            x = read_npz(self.shared / "data" / DATA[_data_of(name)][0], *normalization(name))[0]
        return x[: self.count(samples)]

    def test(self, name: str) -> tuple[Tensor, Tensor]:
        if self.quick:
            if name == "vit":
                return torch.randn(8, 3, 224, 224), torch.arange(8)
            _, _, x, y = embedded.images()
            return x[:_QUICK_TEST], y[:_QUICK_TEST]
        if name == "resnet20_cifar100":
            return _cifar100(self.shared, "test")
        files = [read_npz(self.shared / "data" / file, *normalization(name)) for file in DATA[_data_of(name)][1]]
        return torch.cat([x for x, _ in files]), torch.cat([y for _, y in files if y is not None])

    def prune(
        self, name: str, pattern: str, recipe: Recipe | None, samples: int, mask: str = "magnitude", **options: Any
    ) -> Row:
        """One pruned network, and what it is worth. Without a recipe: the mask alone, with its method's own weights."""
        model, x = self.network(name), self.calibration(name, samples)
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", snows.SnowsWarning)  # such as: no layer is called "*downsample*"
            result = snows.prune(
                model, x, pattern, mask=mask, recipe=recipe, solver=None if recipe is None else "newton",
                progress=False, memory=self.memory, **{**self.chosen_layers, **options},
            )  # fmt: skip
        seconds = time.perf_counter() - began
        cost = {"seconds": round(seconds, 2), "peak_memory_bytes": result.report.peak_memory_bytes}
        return {
            **self.worth(name, result.model, model),
            **(cost if self.memory is None else {}),
            "sparsity": round(result.report.sparsity, 4),
            "network_sparsity": round(result.report.network_sparsity, 4),
        }

    def worth(self, name: str, model: nn.Module, dense: nn.Module) -> Row:
        x, y = self.test(name)
        found = snows.evaluate(model, x, y, dense=dense)
        reference = snows.evaluate(dense, x, y)
        percent = {key: round(100 * found[key], 2) for key in ("top1", "top5", "agreement")}
        return {**percent, "kl": round(found["kl"], 4), "dense": round(100 * reference["top1"], 2)}


def _data_of(name: str) -> str:
    return "mobilenet" if name == "vit" else name  # the same images


def _cifar100(shared: Path, part: str) -> tuple[Tensor, Tensor]:
    import numpy as np

    with np.load(shared / "data" / "cifar100.npz") as archive:
        pixels, labels = torch.from_numpy(archive[f"x_{part}"]), torch.from_numpy(archive[f"y_{part}"])
    mean, std = (torch.tensor(values)[:, None, None] for values in CIFAR100)
    return (pixels.permute(0, 3, 1, 2).float() / 255 - mean) / std, labels.long()


def _cifar100_network(shared: Path) -> nn.Module:
    """The embedded package's ResNet20, whose layers have other names than the file's."""
    model = ResNet20(classes=100)
    state = load_file(shared / "checkpoints" / "resnet20_cifar100.safetensors")
    renamed = {k.replace("shortcut", "downsample").replace("linear", "fc"): v.float() for k, v in state.items()}
    missing, unexpected = model.load_state_dict(renamed, strict=False)
    assert not unexpected, unexpected
    assert all(key.endswith("num_batches_tracked") for key in missing), missing
    return model


def _small_vit() -> nn.Module:
    generator = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = ViT(width=48, depth=2, heads=3)
    torch.random.set_rng_state(generator)
    return model
