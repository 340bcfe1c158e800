"""Hashes of the weights that small runs end with, so that a refactoring can show that no number moved.

    python scripts/fingerprints.py --write before.json     # on the old version
    python scripts/fingerprints.py --compare before.json   # on the new one: names the runs that differ

Everything runs on the CPU with one thread: sums are then taken in the same order every time. Hashes are only comparable
on one machine and one version of torch.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import snows
from tests import networks

Run = Callable[[], dict[str, Tensor]]
RUNS: dict[str, Run] = {}


def run(function: Run) -> Run:
    RUNS[function.__name__] = function
    return function


class Convolutional(nn.Sequential):
    """Residual-free, with a depthwise layer in the middle."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width, bias=False), nn.ReLU6(),
            nn.Conv2d(2 * width, 2 * width, 1), nn.ReLU(), nn.Conv2d(2 * width, width, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10),
        )  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        heads = (part(y).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Vision(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.blocks = nn.Sequential(Block(width, False), Block(width, False))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return self.head(self.blocks(x)[:, 0])


class Language(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.table = nn.Embedding(50, width)
        self.blocks = nn.Sequential(Block(width, True), Block(width, True))
        self.head = nn.Linear(width, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.table(tokens)))


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = build().eval()
    with torch.no_grad():
        networks.random_statistics(model)
    return model


def images(count: int, side: int = 16) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1))


def weights_of(result: snows.Result) -> dict[str, Tensor]:
    return dict(result.model.state_dict()) | {f"mask of {name}": mask for name, mask in result.masks.items()}


def pruned(build: Callable[[], nn.Module], data: Any, pattern: Any, **options: Any) -> dict[str, Tensor]:
    return weights_of(snows.prune(made(build), data, pattern, progress=False, **options))


def tiny(name: str, count: int, pattern: Any, **options: Any) -> dict[str, Tensor]:
    model, data = networks.make(name), networks.example(name, count)
    return weights_of(snows.prune(model, data, pattern, progress=False, **options))


@run
def demo() -> dict[str, Tensor]:
    from snows.cli.commands import app

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        app(["prune", "--quiet", "--device", "cpu", "--out", str(out)], standalone_mode=False)
        return load_file(out / "model.safetensors")


@run
def n_of_m() -> dict[str, Tensor]:
    return pruned(Convolutional, images(96), "2:4")


@run
def n_of_m_obc() -> dict[str, Tensor]:
    return pruned(Convolutional, images(96), "1:4", mask="obc")


@run
def exchange_permuted() -> dict[str, Tensor]:
    return pruned(Convolutional, images(96), "1:4", mask="exchange", permute=True)


@run
def unstructured() -> dict[str, Tensor]:
    return pruned(Convolutional, images(96), 0.8)


@run
def unstructured_sparsegpt() -> dict[str, Tensor]:
    return pruned(Convolutional, images(96), "0.7 erk", mask="sparsegpt")


@run
def wanda_owl() -> dict[str, Tensor]:
    return pruned(Convolutional, images(96), "0.6 owl max=0.9", mask="wanda", horizon=0)


@run
def alps_lamp() -> dict[str, Tensor]:
    return pruned(Convolutional, images(96), "0.6 lamp", mask="alps", horizon=1)


@run
def woodfisher() -> dict[str, Tensor]:
    return pruned(Convolutional, images(96), 0.7, mask=snows.WoodFisher(gradients=40), horizon=2)


@run
def chita() -> dict[str, Tensor]:
    return pruned(Convolutional, images(96), 0.7, mask=snows.CHITA(gradients=40, steps=5), solver=None)


@run
def falcon() -> dict[str, Tensor]:
    solver = snows.CHITA(gradients=40, block=None, steps=3)
    return pruned(Convolutional, images(96), 0.6, mask=snows.FALCON(flops=0.6, solver=solver), solver=None)


@run
def cbs_cap() -> dict[str, Tensor]:
    cbs = pruned(Convolutional, images(96), 0.6, mask=snows.CBS(gradients=20, tries=4, passes=3), solver=None)
    cap = pruned(Convolutional, images(96), "2:4", mask=snows.CAP(gradients=20, block=16), solver=None)
    return {f"cbs {k}": v for k, v in cbs.items()} | {f"cap {k}": v for k, v in cap.items()}


@run
def measured_flops() -> dict[str, Tensor]:
    return pruned(Convolutional, images(48), "0.5 measured flops", horizon=1)


@run
def mixed_patterns() -> dict[str, Tensor]:
    return pruned(Convolutional, images(48), {"3": "2:4", "8": 0.5, "*": "dense"}, horizon=3)


@run
def large_images() -> dict[str, Tensor]:
    recipe = snows.Recipe(finish_steps=6)
    return pruned(lambda: Convolutional(8), images(24, 128), "2:4", recipe=recipe)


@run
def attention() -> dict[str, Tensor]:
    return pruned(Vision, images(64, 32), "2:4")


@run
def attention_hessian() -> dict[str, Tensor]:
    recipe = snows.Recipe(curvature="hessian", horizon=3, sweeps=2, finish_steps=0)
    return pruned(Vision, images(64, 32), 0.5, recipe=recipe, layers="qkv, out")


@run
def language() -> dict[str, Tensor]:
    tokens = torch.randint(0, 50, (48, 12), generator=torch.Generator().manual_seed(1))
    return pruned(Language, tokens, "2:4", mask="sparsegpt", horizon=3)


@run
def given_masks() -> dict[str, Tensor]:
    model = made(Convolutional)
    draw = torch.Generator().manual_seed(3)
    masks = {
        name: torch.rand(model.state_dict()[name].shape, generator=draw) < 0.4 for name in ("3.weight", "8.weight")
    }
    return weights_of(snows.prune(model, images(96), mask=masks, progress=False))


@run
def paper() -> dict[str, Tensor]:
    return pruned(Convolutional, images(96), "2:4", recipe="paper")


@run
def fisher_mini_batches() -> dict[str, Tensor]:
    recipe = snows.Recipe(curvature="fisher", minibatch=32, horizon=2, sweeps=1, normalization="mean")
    return pruned(Convolutional, images(96), 0.5, recipe=recipe)


@run
def half_precision_mirrored() -> dict[str, Tensor]:
    recipe = snows.Recipe(mirror=True, horizon=2)
    return pruned(lambda: Convolutional().half(), images(48), "2:4", recipe=recipe)


@run
def tight_memory() -> dict[str, Tensor]:
    return pruned(Convolutional, images(96), "2:4", memory="6MB", horizon=4)


@run
def resumed() -> dict[str, Tensor]:
    class StopError(Exception):
        pass

    seen: list[object] = []

    def stop(event: object) -> None:
        seen.append(event)
        if len(seen) == 9:
            raise StopError

    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"mask": "sparsegpt", "resume": Path(folder) / "run"}
        with contextlib.suppress(StopError):
            snows.prune(made(Convolutional), images(96), 0.8, progress=stop, **options)
        return pruned(Convolutional, images(96), 0.8, **options)


@run
def tiny_networks() -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in networks.NETWORKS:
        found |= {f"{name} {key}": value for key, value in tiny(name, 40, 0.5, horizon=3).items()}
    return found


def digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.flatten().view(torch.uint8).numpy())
    return found.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a new JSON file for the hashes")
    parser.add_argument("--compare", type=Path, help="a JSON file of another version")
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(RUNS)}; default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    known = json.loads(options.compare.read_text()) if options.compare else {}
    found: dict[str, str] = {}
    different = []
    for name in options.names or RUNS:
        began = time.perf_counter()
        found[name] = digest(RUNS[name]())
        verdict = ""
        if known:
            verdict = "equal" if known.get(name) == found[name] else "DIFFERENT"
            different += [name] if verdict == "DIFFERENT" else []
        print(f"{name:24} {found[name]}  {time.perf_counter() - began:5.1f} s  {verdict}", flush=True)
    if options.write:
        options.write.write_text(json.dumps(found, indent=2) + "\n")
    if different:
        print(f"{len(different)} of {len(found)} runs end with other weights: {', '.join(different)}")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
