"""Sparsity patterns: which masks are allowed, and the best allowed mask for given scores.

A mask is True where a weight is kept. A score is higher where a weight should be kept. Counts are exact, ties included:
equal scores are broken by position, so the same scores always give the same mask.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from .errors import ArgumentError

# No layer keeps less than this share of the average density when weights are ranked over the whole network, so that
# a global ranking cannot cut a layer off (90 % overall: at most 97.5 % in one layer).
_LEAST_SHARE_OF_DENSITY = 0.25


@dataclass(frozen=True)
class NM:
    """N kept of every M consecutive input channels, at each kernel position of each output channel."""

    n: int
    m: int

    def __post_init__(self) -> None:
        if not (isinstance(self.n, int) and isinstance(self.m, int) and 0 < self.n < self.m):
            raise ArgumentError(f"NM({self.n}, {self.m}): N of every M weights are kept, so 0 < N < M is needed")

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def sparsity(self) -> float:
        return 1 - self.n / self.m

    def refusal(self, shape: torch.Size) -> str | None:
        """Why a weight of this shape cannot take the pattern; None if it can."""
        if shape[1] % self.m == 0:
            return None
        return f"its {shape[1]} input channels per group are no multiple of {self.m}"

    def best_mask(self, score: Tensor) -> Tensor:
        """Keep the N best of every M along dimension 1."""
        grouped = score.movedim(1, -1).unflatten(-1, (-1, self.m))  # out, *kernel, in / M, M
        order = grouped.argsort(dim=-1, descending=True, stable=True)
        kept = torch.zeros_like(grouped, dtype=torch.bool).scatter_(-1, order[..., : self.n], True)
        return kept.flatten(-2).movedim(-1, 1).contiguous()

    def violations(self, mask: Tensor) -> int:
        """The number of groups that keep more than N weights."""
        kept = mask.movedim(1, -1).unflatten(-1, (-1, self.m)).sum(-1)
        return int((kept > self.n).sum())


@dataclass(frozen=True)
class Unstructured:
    """A share of the weights removed, wherever they are.

    `spread` says how the share is spread over layers: "global" ranks all selected weights together (no layer loses
    more than its cap), "uniform" removes the same share from each; None leaves it to the mask method.
    """

    sparsity: float
    spread: Literal["global", "uniform"] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.sparsity < 1:
            raise ArgumentError(f"Unstructured({self.sparsity}): the sparsity is the fraction removed, between 0 and 1")
        if self.spread not in (None, "global", "uniform"):
            raise ArgumentError(f"Unstructured: spread is {self.spread!r}; expected 'global', 'uniform' or None")

    def __str__(self) -> str:
        return f"{self.sparsity}" + (f" {self.spread}" if self.spread else "")

    def refusal(self, shape: torch.Size) -> str | None:
        return None

    def best_mask(self, score: Tensor) -> Tensor:
        return keep_best({"": score}, self.sparsity)[""]


Pattern = NM | Unstructured


def keep_best(scores: Mapping[str, Tensor], sparsity: float, cap: bool = False) -> dict[str, Tensor]:
    """Remove exactly round(sparsity * n) of all n weights, the lowest scores first.

    With `cap`, no layer keeps less than a quarter of the average density.
    """
    total = sum(score.numel() for score in scores.values())
    removed = round(sparsity * total)
    flat = torch.cat([score.flatten() for score in scores.values()])
    if cap and len(scores) > 1:
        floor = (1 - sparsity) * _LEAST_SHARE_OF_DENSITY
        protected = torch.cat([_best(score.flatten(), math.ceil(floor * score.numel())) for score in scores.values()])
        flat = flat.masked_fill(protected, math.inf)
    kept = torch.ones(total, dtype=torch.bool, device=flat.device)
    kept[flat.argsort(stable=True)[:removed]] = False
    sizes = [score.numel() for score in scores.values()]
    parts = kept.split(sizes)
    return {name: part.view(score.shape) for (name, score), part in zip(scores.items(), parts, strict=True)}


def _best(score: Tensor, count: int) -> Tensor:
    chosen = torch.zeros_like(score, dtype=torch.bool)
    chosen[score.argsort(descending=True, stable=True)[:count]] = True
    return chosen


def parse_pattern(text: object) -> Pattern | None:
    """ "2:4", "0.7", 0.7, NM(2, 4) …; "dense" or None leaves a layer as it is."""
    if isinstance(text, NM | Unstructured):
        return text
    if text is None or text == "dense":
        return None
    if isinstance(text, str) and (match := re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text)):
        n, m = int(match[1]), int(match[2])
        if not 0 < n < m:
            raise ArgumentError(f"pattern {text!r}: N:M keeps N of every M weights, so 0 < N < M is needed")
        return NM(n, m)
    number, _, spread = text.strip().partition(" ") if isinstance(text, str) else (text, "", "")
    try:
        sparsity = float(number)  # type: ignore[arg-type]  # whatever is no number is refused below
    except (TypeError, ValueError):
        sparsity = math.nan
    if not 0 < sparsity < 1 or spread not in ("", "global", "uniform"):
        raise ArgumentError(
            f"pattern {text!r} is not understood; expected 'N:M' (N kept of every M, such as '2:4'), "
            "a sparsity between 0 and 1 (such as 0.7, or '0.7 uniform'), snows.NM or snows.Unstructured"
        )
    return Unstructured(sparsity, spread or None)  # type: ignore[arg-type]  # one of the two, see above


@dataclass(frozen=True)
class PatternRules:
    """A pattern for each layer: the first glob that matches its name decides."""

    rules: tuple[tuple[str, Pattern | None], ...]

    @classmethod
    def parse(cls, given: object) -> PatternRules:
        """One pattern for all, or {name or glob: pattern}; text may carry both: "1:4, layer1.*=2:4, head=dense"."""
        if isinstance(given, str) and ("=" in given or "," in given):
            parts = [part.strip() for part in given.split(",") if part.strip()]
            named = [tuple(part.split("=", 1)) for part in parts if "=" in part]
            default = [part for part in parts if "=" not in part]
            if len(default) > 1:
                raise ArgumentError(f"pattern {given!r} names {len(default)} patterns for all layers; expected one")
            given = {glob.strip(): text.strip() for glob, text in named}
            if default:
                given["*"] = default[0]
        if isinstance(given, Mapping):
            rules = [(str(glob), parse_pattern(text)) for glob, text in given.items()]
            return cls(tuple(sorted(rules, key=lambda rule: rule[0] == "*")))  # "*" is what holds otherwise
        return cls((("*", parse_pattern(given)),))

    def of(self, name: str) -> Pattern | None:
        return next((pattern for glob, pattern in self.rules if fnmatchcase(name, glob)), None)

    def unmatched(self, names: list[str]) -> list[str]:
        """Globs that fit none of the names: most likely slips of the pen."""
        return [glob for glob, _ in self.rules if not any(fnmatchcase(name, glob) for name in names)]

    def __str__(self) -> str:
        def show(pattern: Pattern | None) -> str:
            return "dense" if pattern is None else str(pattern)

        if len(self.rules) == 1 and self.rules[0][0] == "*":
            return show(self.rules[0][1])
        return ", ".join(f"{glob}={show(pattern)}" for glob, pattern in self.rules)
