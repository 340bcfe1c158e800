"""What is pruned by one process and by several: small networks in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

import snows
from snows.masks.names import NAMES
from tests.networks import example, make

RECIPE = snows.Recipe(horizon=2, sweeps=2, mask_steps=1, cg_steps=5)


@dataclass(frozen=True)
class Case:
    """One call of `snows.prune`."""

    network: str
    pattern: Any
    samples: int = 26
    recipe: snows.Recipe = RECIPE
    options: Callable[[], dict[str, Any]] = dict
    dataset: bool = False  # samples come in a Dataset

    def run(self, **more: Any) -> snows.Result:
        options = {"recipe": self.recipe, "progress": False, **self.options(), **more}
        samples = example(self.network, self.samples)
        return snows.prune(make(self.network), Counted(samples) if self.dataset else samples, self.pattern, **options)


class Counted(Dataset[Tensor]):
    """Samples that remember which of them were read, in the process and since it began."""

    read: ClassVar[set[int]] = set()

    def __init__(self, samples: Tensor) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Tensor:
        self.read.add(index)
        return self._samples[index]


def _given() -> dict[str, Any]:
    return {"mask": {"3.weight": torch.arange(144).view(4, 4, 3, 3) % 3 > 0}}


DATASET = "dataset"  # the only case whose samples are a Dataset
LAST_STAGE = RECIPE.replace(sweeps=1, finish_steps=7, finish_batch=9, finish_rate=1e-2)
CASES = {
    "n-of-m": Case("conv-bn", "2:4"),
    "residual": Case("residual", "1:4"),
    "unstructured": Case("conv-bn", 0.5),
    "mask steps": Case("residual", 0.6, recipe=RECIPE.replace(mask_steps=2)),
    "closed form": Case("conv-bn", "2:4", recipe=RECIPE.replace(horizon=0)),
    "grouped": Case("grouped", 0.5),
    "attention": Case("attention", 0.5),
    "attention, Hessian": Case("attention", 0.5, recipe=RECIPE.replace(targets="dense-weights", curvature="hessian")),
    "fisher": Case("mlp", 0.5, recipe=RECIPE.replace(curvature="fisher")),
    "two inputs": Case("two-inputs", 0.5),
    "mini-batches": Case("conv-bn", "2:4", recipe=RECIPE.replace(minibatch=6)),
    "last stage": Case("conv-bn", "2:4", recipe=LAST_STAGE),
    "last stage of attention": Case("attention", 0.5, recipe=LAST_STAGE),
    DATASET: Case("conv-bn", "2:4", samples=400, recipe=LAST_STAGE.replace(finish_steps=3), dataset=True),
    "mask only": Case("conv-bn", 0.5, options=lambda: {"solver": None}),
    "given mask": Case("conv-bn", None, options=_given),
    "permuted": Case("conv-bn", "2:4", options=lambda: {"permute": True}),
    "measured": Case("conv-bn", "0.5 measured"),
    "owl": Case("mlp", "0.5 owl"),
    "few samples": Case("conv-bn", "2:4", samples=7),
    "fewer samples than ranks": Case("conv-bn", "2:4", samples=2),
    **{f"mask {name}": Case("conv-bn", 0.5, options=lambda name=name: {"mask": name}) for name in NAMES},
}
OUT_OF_MEMORY, COMPARED, READ = "out of memory on one rank", "compared", "read"  # what is done beside the cases


def compared() -> list[tuple[Any, ...]]:
    """The rows of a comparison: masks, patterns, and how far the networks are from the dense one."""
    found = snows.compare(
        make("mlp"), example("mlp", 40), ["2:4", 0.5], ["magnitude", "wanda"], test=example("mlp", 30, seed=3),
        recipe=RECIPE, progress=False,
    )  # fmt: skip
    return [(row.mask, row.pattern, row.snows, row.kl) for row in found.rows]
