"""Several weights as one vector, so that solvers see a single variable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Weights of these shapes, one after another in a vector. A single weight keeps its shape."""

    shapes: tuple[torch.Size, ...]

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0] if len(self.shapes) == 1 else torch.cat([part.flatten() for part in parts])

    def unpack(self, packed: Tensor) -> list[Tensor]:
        if len(self.shapes) == 1:
            return [packed]
        parts = packed.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
