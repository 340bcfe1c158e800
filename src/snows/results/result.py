"""What `snows.prune` gives back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..recipe import Recipe
from .report import Report


@dataclass(frozen=True)
class Result:
    """A pruned model with its masks (True = kept) and the report of how it was made."""

    model: nn.Module
    masks: dict[str, Tensor]
    report: Report
    recipe: Recipe
    source: str | None = None  # the name the dense model was built from, if it has one
    probe: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # a few inputs, kept with the answers when saved

    def save(self, directory: str | Path, *, compact: bool = False, force: bool = False) -> Path:
        """Write model, masks, probe, report, recipe and manifest into a new folder; never over other files.

        compact  store kept weights only (model.compact.safetensors, which `snows.load` expands)
        force    replace a folder that holds another saved result, and nothing else
        """
        from .storage import save

        return save(self, Path(directory), compact, force)
