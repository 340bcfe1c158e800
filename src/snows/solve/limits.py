"""Results that the model's dtype cannot hold: such a layer is kept at its start, and so is the network.

A run computes in float32 or float64. In float16, whose largest number is 65504, its result may be infinite.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import SnowsWarning
from ..events import Distilled
from .layer import SolvedLayer

OUTCOME = "the solved weights are not finite in the model's dtype; the masked weights were kept"


@dataclass(frozen=True)
class Limits:
    """What the parameters of the caller's model can hold. `dtypes` are by parameter name."""

    dtypes: Mapping[str, torch.dtype]

    def solved(self, solved: SolvedLayer, before: Mapping[str, Tensor]) -> SolvedLayer:
        """The solved layers, or those before the solve with the new masks if they do not fit."""
        names = self._not_finite(solved.weights)
        if not names:
            return solved
        self._warn(names, "the masked weights are kept")
        solve = solved.solve
        report = replace(
            solve, outcome=OUTCOME, kept="masked weights", loss=solve.loss_masked, held_out=solve.held_out_masked
        )
        masked = {name: (before[name] * mask).contiguous() for name, mask in solved.masks.items()}
        return replace(solved, weights=masked, solve=report)

    def distilled(self, changed: dict[str, Tensor], ended: Distilled) -> tuple[dict[str, Tensor], Distilled]:
        """What the last stage changed; nothing if it does not fit."""
        names = self._not_finite(changed)
        if not names:
            return changed, ended
        self._warn(names, "the network before the last stage is kept")
        return {}, replace(ended, loss=ended.loss_before)

    def _not_finite(self, tensors: Mapping[str, Tensor]) -> list[str]:
        return [name for name, tensor in tensors.items() if not tensor.to(self.dtypes[name]).isfinite().all()]

    def _warn(self, names: list[str], kept: str) -> None:
        dtype = str(self.dtypes[names[0]]).removeprefix("torch.")
        warnings.warn(
            f"the new values of {', '.join(names[:3])} are not finite in the model's {dtype}; {kept} (model.float() "
            "holds larger numbers)",
            SnowsWarning,
            stacklevel=3,
        )
