"""A saved result as a `Result` again: the model, its masks, and the report of how it was made."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ..data.weights import read_tensors
from ..errors import InputError
from ..events import DenseLayer, Distilled, EpochEnded, SolveReport
from ..reading import is_file, read_json, read_text
from ..recipe import Recipe
from . import probe
from .manifest import PROBE, RECIPE, REPORT, recorded_source
from .report import LayerReport, Report
from .result import Result
from .retraining import Retraining
from .storage import load, load_masks
from .verification import verify

_T = TypeVar("_T")


def read_result(directory: str | Path, model: nn.Module | None = None, trust: bool = False) -> Result:
    """The result in a folder, if `snows.verify` finds nothing wrong with it. `model` and `trust` are those of `load`.

    A given model is copied, not changed.
    """
    folder = Path(directory)
    found = verify(folder, model)
    if not found.ok:
        raise InputError(f"{folder} cannot be used: {found.findings[0]}")
    filled = load(folder, copy.deepcopy(model), trust)
    call = probe.read(*read_tensors(folder / PROBE))[0] if is_file(folder / PROBE) else None
    recipe = Recipe.from_json(read_text(folder / RECIPE))
    report = read_report(read_json(folder / REPORT), str(folder / REPORT))
    return Result(filled, load_masks(folder), report, recipe, recorded_source(folder), call)


def read_report(data: Mapping[str, Any], origin: str) -> Report:
    """The report that `to_dict` wrote. `origin` names it in messages. What older versions did not write is empty."""
    try:
        return _made(
            Report,
            data,
            layers=[_layer(entry) for entry in data["layers"]],
            dense_layers=[_made(DenseLayer, entry) for entry in data["dense_layers"]],
            finish=_made(Distilled, data["finish"]) if data.get("finish") else None,
            retraining=_retraining(data["retraining"]) if data.get("retraining") else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{origin} is no report of snows: {error}") from error


def _layer(entry: Mapping[str, Any]) -> LayerReport:
    solves = [_made(SolveReport, solve) for solve in entry.get("solves", ())]
    return _made(LayerReport, entry, solves=solves)


def _retraining(entry: Mapping[str, Any]) -> Retraining:
    return _made(Retraining, entry, history=[_made(EpochEnded, epoch) for epoch in entry["history"]])


def _made(kind: type[_T], entry: Mapping[str, Any], **known: Any) -> _T:
    """A dataclass from its data."""
    fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]  # they are dataclasses
    read = {name: _typed(value, fields[name]) for name, value in entry.items() if name in fields and name not in known}
    return kind(**read, **known)


def _typed(value: Any, annotation: str) -> Any:
    """JSON has neither tuples nor NaN: a number that is not there is one."""
    if value is None and annotation == "float":
        return math.nan
    if annotation.startswith("tuple["):
        return _as_tuple(value)
    return _numbers(value) if annotation == "Mapping[str, float]" else value


def _as_tuple(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_as_tuple(entry) for entry in value)
    return math.nan if value is None else value


def _numbers(figures: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in figures.items()}
