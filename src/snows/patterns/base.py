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
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..errors import ArgumentError

_LEAST_SHARE_OF_DENSITY = 0.25
_ROUNDING = 1e-9  # 0.7 * 10 is 7, not 7.000000000000001


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
    def group(self) -> tuple[int, int] | None:
        return self.m, self.n

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

    def on_the_way(self, share: float) -> NM:
        """The pattern after this share of the way there, each part of which keeps the same share of what was left.

        Of each group no more than that is kept, so that 1:4 in three steps is 2:4, 1:4, 1:4.
        """
        kept = math.floor(self.m * (self.n / self.m) ** share + _ROUNDING)
        return NM(min(max(kept, self.n), self.m - 1), self.m)

    def violations(self, mask: Tensor) -> int:
        """The number of groups that keep more than N weights."""
        kept = mask.movedim(1, -1).unflatten(-1, (-1, self.m)).sum(-1)
        return int((kept > self.n).sum())


Spread = Literal["uniform", "global", "erk", "lamp", "owl", "measured"]
SPREADS: tuple[Spread, ...] = get_args(Spread)


@dataclass(frozen=True)
class Unstructured:
    """A share of the weights removed, wherever they are.

    `spread` says how the share is spread over layers (see `snows.budgets`); None leaves it to the mask method.
    `of` says what the share is a share of: weights, or multiplications ("flops"; not exact, but never less).
    `least` and `most` bound the sparsity of each layer.
    """

    sparsity: float
    spread: Spread | None = None
    of: Literal["weights", "flops"] = "weights"
    least: float = 0.0
    most: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity < 1:  # of nothing, where a budget leaves a layer whole
            raise ArgumentError(f"Unstructured({self.sparsity}): the sparsity is the fraction removed, between 0 and 1")
        if self.spread not in (None, *SPREADS):
            known = ", ".join(repr(name) for name in SPREADS)
            raise ArgumentError(f"Unstructured: spread is {self.spread!r}; expected {known} or None")
        if self.of not in ("weights", "flops"):
            raise ArgumentError(f"Unstructured: of is {self.of!r}; expected 'weights' or 'flops'")
        if self.of == "flops" and self.spread not in (None, "measured", "uniform"):
            raise ArgumentError(
                f"Unstructured: a share of the flops cannot be spread {self.spread!r}; expected 'measured' or 'uniform'"
            )
        if not 0 <= self.least <= self.sparsity <= (1 if self.most is None else self.most) <= 1:
            raise ArgumentError(
                f"Unstructured({self.sparsity}): least is {self.least} and most {self.most}; "
                "expected 0 <= least <= sparsity <= most <= 1"
            )

    def __str__(self) -> str:
        words = [f"{self.sparsity}", self.spread, "flops" if self.of == "flops" else None]
        words += [f"min={self.least}" if self.least else None, None if self.most is None else f"max={self.most}"]
        return " ".join(word for word in words if word)

    group = None

    def violations(self, mask: Tensor) -> int:
        return 0

    def refusal(self, shape: torch.Size) -> str | None:
        return None

    def best_mask(self, score: Tensor) -> Tensor:
        return keep_best({"": score}, self.sparsity)[""]

    def on_the_way(self, share: float) -> Unstructured:
        """The same after this share of the way there, each part of which keeps the same share of what was left."""
        if share == 1:
            return self
        sparsity, least = (1 - (1 - removed) ** share for removed in (self.sparsity, self.least))
        return Unstructured(sparsity, self.spread, least=least, most=self.most)

    def bounds(self, size: int) -> tuple[int, int]:
        """How many of a layer's weights may be removed: at least, and at most.

        Unless told, a layer keeps a quarter of the average density, so that a ranking of the whole network cannot cut
        it off (90 % overall: at most 97.5 % in one layer).
        """
        most = 1 - (1 - self.sparsity) * _LEAST_SHARE_OF_DENSITY if self.most is None else self.most
        return math.ceil(self.least * size - _ROUNDING), math.floor(most * size + _ROUNDING)


Pattern = NM | Unstructured


def keep_best(
    scores: Mapping[str, Tensor], sparsity: float, bounds: Mapping[str, tuple[int, int]] | None = None
) -> dict[str, Tensor]:
    """Remove exactly round(sparsity * n) of all n weights, the lowest scores first.

    `bounds` say how many each layer loses at least and at most.
    """
    total = sum(score.numel() for score in scores.values())
    removed = round(sparsity * total)
    parts = [score.flatten() for score in scores.values()]
    order = torch.cat(parts).argsort(stable=True)
    if bounds is not None and len(scores) > 1:
        ranks = [ranks_within(part, *bounds[name]) for name, part in zip(scores, parts, strict=True)]
        order = order[torch.cat(ranks)[order].argsort(stable=True)]
    kept = torch.ones(total, dtype=torch.bool, device=parts[0].device)
    kept[order[:removed]] = False
    split = kept.split([part.numel() for part in parts])
    return {name: part.view(score.shape) for (name, score), part in zip(scores.items(), split, strict=True)}


def ranks_within(score: Tensor, least: int, most: int) -> Tensor:
    """Where at least and at most so many go: -1 for those that must, 1 for those that must stay, 0 for all between."""
    order = score.argsort(stable=True)
    rank = torch.zeros_like(score, dtype=torch.int8)
    rank[order[:least]] = -1
    rank[order[most:]] = 1
    return rank


def parse_pattern(text: object) -> Pattern | None:
    """ "2:4", "0.7", 0.7, NM(2, 4) …; "dense" or None leaves a layer as it is."""
    if isinstance(text, NM | Unstructured):
        return text
    if text is None or text == "dense":
        return None
    if isinstance(text, str) and (match := re.fullmatch(r"\s*(\d{1,9})\s*:\s*(\d{1,9})\s*", text)):
        n, m = int(match[1]), int(match[2])
        if not 0 < n < m:
            raise ArgumentError(f"pattern {text!r}: N:M keeps N of every M weights, so 0 < N < M is needed")
        return NM(n, m)
    words: list[Any] = text.split() if isinstance(text, str) else [text]
    try:
        sparsity = float(words[0])
    except (TypeError, ValueError, IndexError, OverflowError):
        sparsity = math.nan
    options = _read_options(words[1:]) if 0 < sparsity < 1 else None
    if options is None:
        raise ArgumentError(
            f"pattern {text!r} is not understood; expected 'N:M' (N kept of every M, such as '2:4'), a sparsity "
            f"between 0 and 1 (such as 0.7, '0.7 erk' or '0.7 measured flops max=0.9'; spread {', '.join(SPREADS)}), "
            "snows.NM or snows.Unstructured"
        )
    return Unstructured(sparsity, **options)


def _read_options(words: list[str]) -> dict[str, Any] | None:
    """The words behind a sparsity; None if one of them is not known."""
    options: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        if word in SPREADS:
            options["spread"] = word
        elif word == "flops":
            options["of"] = word
        elif key in ("min", "max") and re.fullmatch(r"[01]?\.?\d+", value):
            options["least" if key == "min" else "most"] = float(value)
        else:
            return None
    return options


@dataclass(frozen=True)
class PatternRules:
    """A pattern for each layer: the first glob that matches its name decides."""

    rules: tuple[tuple[str, Pattern | None], ...]

    @classmethod
    def parse(cls, given: object) -> PatternRules:
        """One pattern for all, or {name or glob: pattern}; text may carry both: "1:4, layer1.*=2:4, head=dense"."""
        if isinstance(given, str) and ("=" in given or "," in given):
            parts = [part.strip() for part in given.split(",") if part.strip()]
            # "0.7 max=0.9" names no layer
            default = [part for part in parts if "=" not in part or re.match(r"[\d.:]+\s+(?!=|\s)", part)]
            named = [tuple(part.split("=", 1)) for part in parts if part not in default]
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
