"""N:M sparsity: N kept of every M weights, the pattern that sparse tensor cores run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from ..errors import ArgumentError
from .base import ROUNDING, Group, Pattern


@final
@dataclass(frozen=True)
class NM(Pattern):
    """N kept of every M consecutive input channels, at each kernel position of each output channel.

    Written "N:M", such as "2:4". A layer whose input channels (per group of a convolution) are not a multiple of M
    cannot take the pattern and stays dense.

    Args:
        n: How many weights of each group are kept.
        m: How many weights form a group; more than `n`.

    Raises:
        ArgumentError: If not 0 < n < m.

    Example:
        >>> import torch, snows
        >>> snows.NM(2, 4).best_mask(torch.tensor([[0.1, 0.9, 0.5, 0.3]]))
        tensor([[False,  True,  True, False]])
        >>> str(snows.NM(2, 4)), snows.NM(1, 4).sparsity
        ('2:4', 0.75)
    """

    n: int
    m: int
    sparsity: float = field(init=False, repr=False, compare=False)
    form: ClassVar[str] = "'N:M' (N kept of every M, such as '2:4')"

    def __post_init__(self) -> None:
        if not (isinstance(self.n, int) and isinstance(self.m, int) and 0 < self.n < self.m):
            raise ArgumentError(f"NM({self.n}, {self.m}): N of every M weights are kept, so 0 < N < M is needed")
        object.__setattr__(self, "sparsity", 1 - self.n / self.m)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        match = re.fullmatch(r"\s*(\d{1,9})\s*:\s*(\d{1,9})\s*", text)
        if match is None:
            return None
        n, m = int(match[1]), int(match[2])
        if not 0 < n < m:
            raise ArgumentError(f"pattern {text!r}: N:M keeps N of every M weights, so 0 < N < M is needed")
        return cls(n, m)

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def group(self) -> Group:
        return Group(self.m, self.n)

    def refusal(self, shape: torch.Size) -> str | None:
        if shape[1] % self.m == 0:
            return None
        return f"its {shape[1]} input channels per group are no multiple of {self.m}"

    def best_mask(self, score: Tensor) -> Tensor:
        grouped = self._grouped(score)
        order = grouped.argsort(dim=-1, descending=True, stable=True)
        kept = torch.zeros_like(grouped, dtype=torch.bool).scatter_(-1, order[..., : self.n], True)
        return kept.flatten(-2).movedim(-1, 1).contiguous()

    def on_the_way(self, share: float) -> NM:
        """Each equal part of the way keeps the same share of what was left, rounded down: 1:4 by way of 2:4."""
        kept = math.floor(self.m * (self.n / self.m) ** share + ROUNDING)
        return NM(min(max(kept, self.n), self.m - 1), self.m)

    def violations(self, mask: Tensor) -> int:
        """How many groups keep more than N weights."""
        return int((self._grouped(mask).sum(-1) > self.n).sum())

    def complaint(self, masks: Mapping[str, Tensor]) -> str | None:
        for name, mask in masks.items():
            kept = self._grouped(mask).sum(-1)
            if wrong := int((kept != self.n).sum()):
                return (
                    f"{wrong} of {kept.numel()} groups of {name} do not keep {self.n} of {self.m} input channels "
                    "(True means kept)"
                )
        return None

    def _grouped(self, values: Tensor) -> Tensor:
        """Values of a weight's shape as out x *kernel x in / M x M."""
        grouped: Tensor = values.movedim(1, -1).unflatten(-1, (-1, self.m))
        return grouped
