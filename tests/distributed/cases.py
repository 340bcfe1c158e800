"""What is pruned by one process and by several: small networks in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

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

    def run(self, **more: Any) -> snows.Result:
        options = {"recipe": self.recipe, "progress": False, **self.options(), **more}
        return snows.prune(make(self.network), example(self.network, self.samples), self.pattern, **options)


def _given() -> dict[str, Any]:
    return {"mask": {"3.weight": torch.arange(144).view(4, 4, 3, 3) % 3 > 0}}


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
    "mask only": Case("conv-bn", 0.5, options=lambda: {"solver": None}),
    "given mask": Case("conv-bn", None, options=_given),
    "permuted": Case("conv-bn", "2:4", options=lambda: {"permute": True}),
    "measured": Case("conv-bn", "0.5 measured"),
    "owl": Case("mlp", "0.5 owl"),
    "few samples": Case("conv-bn", "2:4", samples=7),
    "fewer samples than ranks": Case("conv-bn", "2:4", samples=2),
    **{f"mask {name}": Case("conv-bn", 0.5, options=lambda name=name: {"mask": name}) for name in NAMES},
}
