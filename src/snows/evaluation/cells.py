"""Which networks a comparison makes: every mask for every pattern, each without and with SNOWS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import ArgumentError
from ..masks import as_method
from ..masks.given import is_mask_file
from ..patterns import PatternRules
from ..results.folder import cell_name, describe
from .table import Row


@dataclass(frozen=True)
class Cell:
    """One network to make."""

    mask: str
    method: Any
    source: str  # what the mask's name stands for; a finished cell on disk must have the same
    pattern: Any  # None: the mask is complete
    snows: bool

    @property
    def row(self) -> Row:
        return Row(self.mask, "given" if self.pattern is None else str(PatternRules.parse(self.pattern)), self.snows)

    @property
    def file(self) -> str:
        return cell_name(self.mask, str(self.row.pattern), self.snows)


def plan_cells(patterns: Any, masks: Any) -> list[Cell]:
    """All networks: by pattern, then by mask, without SNOWS first. Wrong names are refused."""
    named = _named_masks(masks)
    several = patterns if isinstance(patterns, list | tuple) else [] if patterns is None else [patterns]
    different = {str(PatternRules.parse(pattern)): pattern for pattern in several}
    methods = {name: mask for name, mask in named.items() if not _is_complete(mask)}
    for mask in methods.values():
        as_method(mask)
    if methods and not different:
        raise ArgumentError(f"no pattern is given for the mask {next(iter(methods))}; expected some, such as '2:4'")
    pairs = [(pattern, name) for pattern in different.values() for name in methods]
    pairs += [(None, name) for name in named if name not in methods]
    return [
        Cell(name, named[name], describe(named[name]), pattern, snows)
        for pattern, name in pairs
        for snows in (False, True)
    ]


def _named_masks(masks: Any) -> dict[str, Any]:
    named = _mapping_of_masks(masks) if isinstance(masks, Mapping) else _list_of_masks(masks)
    if not named:
        raise ArgumentError("no mask is given; expected some, such as 'magnitude'")
    return named


def _mapping_of_masks(masks: Mapping[Any, Any]) -> dict[str, Any]:
    if any(isinstance(mask, Tensor) for mask in masks.values()):
        raise ArgumentError("masks is one {name: bool tensor}; put it into a list, or give it a name: {'mine': …}")
    return {str(name): mask for name, mask in masks.items()}


def _list_of_masks(masks: Any) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for mask in masks if isinstance(masks, list | tuple) else [masks]:
        name = _name(mask)
        if name in named and not isinstance(mask, str):
            raise ArgumentError(f"two masks are called {name!r}; give them names: masks={{'first': …, 'second': …}}")
        named[name] = mask
    return named


def _is_complete(mask: Any) -> bool:
    """Whether it is a mask already, rather than a method that chooses one."""
    return isinstance(mask, Mapping | nn.Module) or is_mask_file(mask) or (isinstance(mask, str) and mask == "weights")


def _name(mask: Any) -> str:
    if isinstance(mask, str) or is_mask_file(mask):
        return str(mask)
    return "given" if isinstance(mask, Mapping | nn.Module) else describe(mask)
