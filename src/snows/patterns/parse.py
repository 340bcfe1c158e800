"""Patterns from what a user writes: one pattern, or rules that give layers different ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..errors import ArgumentError, shown
from .base import Pattern
from .curves import Curves
from .nm import NM
from .unstructured import Unstructured

KINDS: tuple[type[Pattern], ...] = (NM, Unstructured)


def parse_pattern(given: object) -> Pattern | None:
    """A pattern from text or a number: "2:4", "0.7", 0.7. "dense" or None stands for a layer that stays dense."""
    if isinstance(given, Pattern):
        return given
    if given is None or given == "dense":
        return None
    text = given if isinstance(given, str) else _number_as_text(given)
    for kind in KINDS:
        if (pattern := kind.parse(text)) is not None:
            return pattern
    forms = ", ".join(kind.form for kind in KINDS)
    raise ArgumentError(f"pattern {shown(given)} is not understood; expected {forms}, snows.NM or snows.Unstructured")


def _number_as_text(given: object) -> str:
    try:
        return repr(float(given))  # type: ignore[arg-type]  # what is no number raises
    except (TypeError, ValueError, OverflowError):
        return ""


@dataclass(frozen=True)
class PatternRules:
    """A pattern for each layer: the first glob that matches its name decides."""

    rules: tuple[tuple[str, Pattern | None], ...]

    @classmethod
    def parse(cls, given: object) -> PatternRules:
        """One pattern for all layers, or {name or glob: pattern}; text may hold both: "1:4, layer1.*=2:4, head=dense".

        The glob "*" comes last, wherever it is given.
        """
        if isinstance(given, str) and ("=" in given or "," in given):
            given = _split_rules(given)
        if not isinstance(given, Mapping):
            given = {"*": given}
        rules = [(str(glob), parse_pattern(text)) for glob, text in given.items()]
        found = cls(tuple(sorted(rules, key=lambda rule: rule[0] == "*")))
        for curves in found.curves:
            _ = curves.layers  # reads the file: a wrong one costs the user nothing now
        return found

    def of(self, name: str) -> Pattern | None:
        """The pattern of the layer of this name; None if it stays dense."""
        return next((pattern for glob, pattern in self.rules if fnmatchcase(name, glob)), None)

    @property
    def curves(self) -> list[Curves]:
        """The measurements that budgets among the patterns read from files."""
        budgets = [pattern.budget for _, pattern in self.rules if pattern is not None]
        return [budget.curves for budget in budgets if budget is not None and budget.curves is not None]

    def unmatched(self, names: list[str]) -> list[str]:
        """Globs that match none of the names, most likely misspelled."""
        return [glob for glob, _ in self.rules if not any(fnmatchcase(name, glob) for name in names)]

    def __str__(self) -> str:
        texts = {glob: "dense" if pattern is None else str(pattern) for glob, pattern in self.rules}
        if list(texts) == ["*"]:
            return texts["*"]
        return ", ".join(f"{glob}={text}" for glob, text in texts.items())


def _split_rules(text: str) -> dict[str, str]:
    """ "1:4, head=2:4" as {"head": "2:4", "*": "1:4"}."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    # "0.7 max=0.9" has an equals sign, but names no layer
    for_all = [part for part in parts if "=" not in part or re.match(r"[\d.:e+-]+\s+[^=\s]", part)]
    if len(for_all) > 1:
        raise ArgumentError(f"pattern {text!r} names {len(for_all)} patterns for all layers; expected one")
    named = (part.split("=", 1) for part in parts if part not in for_all)
    rules = {glob.strip(): pattern.strip() for glob, pattern in named}
    return rules | {"*": for_all[0]} if for_all else rules
