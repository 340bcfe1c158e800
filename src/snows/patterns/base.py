"""What a sparsity pattern is: which masks it allows, and which of them is the best for given scores.

A mask is True where a weight is kept. A score is higher where a weight should be kept. Equal scores are told apart by
their position, so the same scores always give the same mask.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor

from ..errors import ArgumentError
from .curves import Curves

Spread = Literal["uniform", "global", "erk", "lamp", "owl", "measured"]
SPREADS: tuple[Spread, ...] = get_args(Spread)

ROUNDING = 1e-9  # 0.7 * 10 is 7, not 7.000000000000001
_LEAST_SHARE_OF_DENSITY = 0.25


class Group(NamedTuple):
    """Of every `size` consecutive input channels, at one kernel position of one output channel, `kept` are kept."""

    size: int
    kept: int

    @property
    def removed(self) -> int:
        return self.size - self.kept


@dataclass(frozen=True)
class Budget:
    """A sparsity that several layers reach together. `snows.Unstructured` describes the fields."""

    sparsity: float
    spread: Spread | None = None
    of: Literal["weights", "flops"] = "weights"
    least: float = 0.0
    most: float | None = None
    curves: Curves | None = None

    def __post_init__(self) -> None:
        kind = type(self).__name__
        if not 0 <= self.sparsity < 1:
            raise ArgumentError(f"{kind}({self.sparsity}): the sparsity is the fraction removed, between 0 and 1")
        if self.spread not in (None, *SPREADS):
            known = ", ".join(repr(name) for name in SPREADS)
            raise ArgumentError(f"{kind}: spread is {self.spread!r}; expected {known} or None")
        if self.of not in ("weights", "flops"):
            raise ArgumentError(f"{kind}: of is {self.of!r}; expected 'weights' or 'flops'")
        if self.of == "flops" and self.spread not in (None, "measured", "uniform"):
            raise ArgumentError(
                f"{kind}: a share of the flops cannot be spread {self.spread!r}; expected 'measured' or 'uniform'"
            )
        if self.curves is not None and self.spread != "measured":
            raise ArgumentError(f"{kind}: curves are for the spread 'measured', but spread is {self.spread!r}")
        if not 0 <= self.least <= self.sparsity <= (1 if self.most is None else self.most) <= 1:
            raise ArgumentError(
                f"{kind}({self.sparsity}): least is {self.least} and most {self.most}; "
                "expected 0 <= least <= sparsity <= most <= 1"
            )

    def bounds(self, size: int) -> tuple[int, int]:
        """How many of a layer's `size` weights may be removed: at least, and at most.

        Without `most` a layer keeps at least a quarter of the average density, so that a ranking of the whole network
        cannot cut it off: at 90 % overall, one layer loses at most 97.5 %.
        """
        most = 1 - (1 - self.sparsity) * _LEAST_SHARE_OF_DENSITY if self.most is None else self.most
        return math.ceil(self.least * size - ROUNDING), math.floor(most * size + ROUNDING)


class Pattern(ABC):
    """Which masks a layer's weight may have.

    The package has two kinds, `NM` and `Unstructured`. To add one, subclass this in a file of its own and name the
    class in `snows.patterns.parse.KINDS`. A kind defines `sparsity`, `best_mask`, `violations` and `__str__`; the other
    methods have defaults for kinds of which every layer reaches the sparsity by itself. Make it a frozen dataclass:
    equal patterns must have equal hashes.

    Attributes:
        sparsity: The fraction of the weights that is removed.
        form: How the pattern is written, for error messages; empty if it has no text form.

    Example:
        A kind that removes whole inputs of a layer.

        >>> import dataclasses, torch, snows
        >>> @dataclasses.dataclass(frozen=True)
        ... class Inputs(snows.Pattern):
        ...     sparsity: float
        ...     def best_mask(self, score):
        ...         order = score.transpose(0, 1).flatten(1).sum(1).argsort()
        ...         kept = torch.ones_like(score, dtype=torch.bool)
        ...         kept[:, order[: round(self.sparsity * len(order))]] = False
        ...         return kept
        ...     def violations(self, mask):
        ...         return int((mask.any(0) != mask.all(0)).sum())
        ...     def __str__(self):
        ...         return f"{self.sparsity} of the inputs"
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2)).eval()
        >>> result = snows.prune(model, torch.randn(64, 4), Inputs(0.5), layers="0", progress=False)
        >>> sorted(result.masks["0.weight"].sum(0).tolist())
        [0, 0, 6, 6]
    """

    sparsity: float
    form: ClassVar[str] = ""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The pattern that `text` describes, or None if the text is not of this kind."""
        return None

    @abstractmethod
    def __str__(self) -> str:
        """The text that `parse` reads."""

    def refusal(self, shape: torch.Size) -> str | None:
        """Why a weight of this shape cannot take the pattern; None if it can."""
        return None

    @abstractmethod
    def best_mask(self, score: Tensor) -> Tensor:
        """The allowed mask with the highest sum of scores. `score` has the shape of the weight."""

    def best_mask_by_row(self, score: Tensor) -> Tensor:
        """The best mask if weights are compared only within their output row, where the pattern leaves a choice."""
        return self.best_mask(score)

    def best_masks(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The best masks for the scores of several layers that share the pattern."""
        return {name: self.best_mask(score) for name, score in scores.items()}

    def on_the_way(self, share: float) -> Pattern:
        """The pattern after this share of the way from dense to it; by default the pattern itself at once."""
        return self

    @abstractmethod
    def violations(self, mask: Tensor) -> int:
        """In how many places (such as groups) one layer's mask breaks the pattern."""

    def complaint(self, masks: Mapping[str, Tensor]) -> str | None:
        """What is wrong with masks of layers that share the pattern, as a sentence; None if they are exact."""
        for name, mask in masks.items():
            removed, (least, most) = int((~mask).sum()), self.bounds(mask.numel())
            if not least <= removed <= most:
                return f"it removes {removed} of {name}; expected {_range(least, most)} (True means kept)"
            if wrong := self.violations(mask):
                return f"the mask of {name} breaks the pattern {self} in {wrong} places (True means kept)"
        return None

    def bounds(self, size: int) -> tuple[int, int]:
        """How many of a layer's `size` weights may be removed: at least, and at most."""
        exactly = round(self.sparsity * size)
        return exactly, exactly

    @property
    def group(self) -> Group | None:
        """The groups of N:M, within which one weight may be kept in place of another; None for other kinds."""
        return None

    @property
    def is_unstructured(self) -> bool:
        """Whether any weight of a layer may be kept in place of any other."""
        return False

    @property
    def budget(self) -> Budget | None:
        """What layers that share the pattern lose together; None if each layer loses its own share."""
        return None

    def with_budget(self, budget: Budget) -> Pattern:
        """The same kind of pattern with another budget. Only asked of patterns that have one."""
        raise NotImplementedError(f"{type(self).__name__} has a budget, but does not define with_budget")

    @property
    def ranked_together(self) -> bool:
        """Whether the weights of all layers that share the pattern compete with each other."""
        return self.budget is not None and self.budget.spread == "global"


def _range(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"
