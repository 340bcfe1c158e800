"""What the caller asked for, as objects."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .devices.weights import where_they_rest
from .graph import Graph
from .patterns import PatternRules
from .recipe import Recipe
from .results.folder import describe, digest, versions


@dataclass(frozen=True)
class Task:
    """What the caller asked for."""

    model: nn.Module
    calibration: Any
    rules: PatternRules | None  # None: the given masks need no pattern
    mask: Any
    layers: tuple[str, ...] | None  # None: the default
    exclude: tuple[str, ...] | None
    recipe: Recipe
    readjusts: bool  # False: mask only
    device: torch.device | None
    seed: int
    given_labels: bool
    permute: bool
    resume: Path | None
    memory: int | None

    @property
    def mask_name(self) -> str:
        """How the report names the mask, if a method chooses it."""
        return self.mask if isinstance(self.mask, str) else repr(self.mask)

    def facts(self, graph: Graph, calibration: str, samples: int, device: str) -> dict[str, Any]:
        """Everything that decides the result, which is not the number of ranks. `calibration` is a digest."""
        return {
            "weights": digest(where_they_rest(graph.parameters)),
            "calibration": calibration,
            "samples": samples,
            "pattern": None if self.rules is None else str(self.rules),
            "measurements": [] if self.rules is None else [curves.digest for curves in self.rules.curves],
            "mask": describe(self.mask),
            "layers": self.layers and list(self.layers),
            "exclude": self.exclude and list(self.exclude),
            "solver": "newton" if self.readjusts else None,
            "labels": "given" if self.given_labels else "model",
            "permute": self.permute,
            "seed": self.seed,
            "memory": self.memory,
            "recipe": dataclasses.asdict(self.recipe),
            "device": device,
            "versions": versions(),
        }
