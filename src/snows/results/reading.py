"""A saved result as a `Result` again: the model, its masks, and the report of how it was made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from torch import nn

from ..data.usable import copied
from ..data.weights import read_tensors
from ..errors import InputError, a_type
from ..reading import as_path, is_file, read_json, read_text
from ..recipe import Recipe
from . import probe
from .manifest import PROBE, RECIPE, REPORT, recorded_source
from .report import Report
from .result import Result
from .storage import load, load_masks
from .verification import verify

_T = TypeVar("_T")


def read_result(directory: str | Path, model: nn.Module | None = None, trust: bool = False) -> Result:
    """The result in a folder, if `snows.verify` finds nothing wrong with it. `model` and `trust` are those of `load`.

    A given model is copied, not changed.
    """
    folder = as_path(directory, "directory")
    found = verify(folder, model)
    if not found.ok:
        raise InputError(f"{folder} cannot be used: {found.findings[0]}")
    filled = load(folder, None if model is None else copied(model), trust)
    call = probe.read(*read_tensors(folder / PROBE))[0] if is_file(folder / PROBE) else None
    recipe = Recipe.from_json(read_text(folder / RECIPE))
    report = read_report(read_json(folder / REPORT), str(folder / REPORT))
    return Result(filled, load_masks(folder), report, recipe, recorded_source(folder), call)


def read_report(data: Mapping[str, Any], origin: str) -> Report:
    """The report that `to_dict` wrote. `origin` names it in messages. What older versions did not write is empty."""
    try:
        report: Report = _value(Report, data)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{origin} is no report of snows: {error}") from error
    return report


def _value(kind: Any, written: Any) -> Any:
    """A value of this type from JSON, which has neither tuples nor NaN: a number that is not there is one."""
    if dataclasses.is_dataclass(kind):
        kinds, entries = get_type_hints(kind), _require(dict, written).items()
        return kind(**{name: _value(kinds[name], entry) for name, entry in entries if name in kinds})  # type: ignore[operator]  # it is a class
    whole, parts = get_origin(kind), get_args(kind)
    if whole is UnionType:  # X | None
        return None if written is None else _value(parts[0], written)
    if whole in (tuple, list):
        items = _require(list, written)
        each = parts if whole is tuple and ... not in parts else [parts[0]] * len(items)
        return whole(_value(part, item) for part, item in zip(each, items, strict=True))
    if whole in (dict, Mapping):
        return {name: _value(parts[1], entry) for name, entry in _require(dict, written).items()}
    return math.nan if kind is float and written is None else written


def _require(kind: type[_T], written: Any) -> _T:
    if not isinstance(written, kind):
        raise TypeError(f"it has {a_type(written)} in place of a {kind.__name__}")
    return written
