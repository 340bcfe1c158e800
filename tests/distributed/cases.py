"""What is pruned by one process and by several: small networks, most of them in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import snows
from snows.masks.names import NAMES
from snows.solve import distill
from snows.solve.distill import _Match
from tests.networks import example, make
from tests.transformers import Language, build, token_samples

LANGUAGE = "language"
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
    rising: bool = False  # later samples are larger
    single: bool = False  # in float32

    def run(self, **more: Any) -> snows.Result:
        options = {"recipe": self.recipe, "progress": False, **self.options(), **more}
        calibration = self.calibration()
        return snows.prune(self.model(), Counted(calibration) if self.dataset else calibration, self.pattern, **options)

    def model(self) -> nn.Module:
        made = build(Language).double() if self.network == LANGUAGE else make(self.network)
        return made.float() if self.single else made

    def calibration(self) -> Any:
        made = token_samples(self.samples) if self.network == LANGUAGE else example(self.network, self.samples)
        if self.rising:
            made = made * torch.linspace(0.1, 3, self.samples).double().view(-1, *[1] * (made.ndim - 1))
        return made.float() if self.single else made


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
    "language": Case(LANGUAGE, "2:4", recipe=RECIPE.replace(sweeps=1)),
    "last stage of language": Case(LANGUAGE, 0.5, recipe=LAST_STAGE.replace(finish_steps=3)),
    "some samples in products": Case("mlp", 0.5, samples=1300, rising=True),
    "few samples in products": Case("conv-bn", 0.5, samples=300, recipe=RECIPE.replace(product_samples=2), rising=True),
    "global": Case("conv-bn", "0.5 global"),
    "few samples": Case("conv-bn", "2:4", samples=7),
    "fewer samples than ranks": Case("conv-bn", "2:4", samples=2),
    **{f"mask {name}": Case("conv-bn", 0.5, options=lambda name=name: {"mask": name}) for name in NAMES},
}
SINGLE = {
    "float32": Case("residual", "2:4", single=True),
    "float32, attention": Case("attention", 0.5, single=True),
    "float32, last stage": Case("conv-bn", "2:4", recipe=LAST_STAGE, single=True),
}
IN_PIECES = Case("conv-bn", "2:4", samples=60, recipe=LAST_STAGE.replace(finish_batch=12), dataset=True)
MEMORY_OF_LAST_STAGE = "out of memory on one rank in the last stage"
MEMORY_OF_ROWS = "out of memory on one rank before rows are shared, and on another in its rows"
SENSITIVITY = "what each layer tolerates"
OUT_OF_MEMORY, COMPARED, READ = "out of memory on one rank", "compared", "read"  # what is done beside the cases


def compared() -> list[tuple[Any, ...]]:
    """The rows of a comparison: masks, patterns, and how far the networks are from the dense one."""
    found = snows.compare(
        make("mlp"), example("mlp", 40), ["2:4", 0.5], ["magnitude", "wanda"], test=example("mlp", 30, seed=3),
        recipe=RECIPE, progress=False,
    )  # fmt: skip
    return [(row.mask, row.pattern, row.snows, row.kl) for row in found.rows]


def sensitivity() -> str:
    """Of all layers of a small network, as text."""
    return snows.sensitivity(make("residual"), example("residual", 40), [0.5, "2:4"], progress=False).to_json()


@contextmanager
def full_memory_of_last_stage(here: bool = True) -> Iterator[None]:
    """A batch is cut in two, and the gradient of its first half runs out of memory, if it is to be `here`."""
    loss, calls = _Match.loss, count()

    def failing(self: _Match, *arguments: Any) -> Tensor:
        if torch.is_grad_enabled() and next(calls) == 0 and here:
            raise torch.OutOfMemoryError("full")
        return loss(self, *arguments)

    with mock.patch.object(_Match, "loss", failing), mock.patch.object(distill, "_pieces", return_value=2):
        yield
