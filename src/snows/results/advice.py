"""Which layers of a report stand out, and what to do about them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

_MANY = 3  # layers at most
_FACTOR = 2.0  # a layer stands out with so many times the median error
_OVERFITTED = 1.5  # held-out loss over fitted loss

Data = Mapping[str, Any]


def advice(report: Data) -> dict[int, str]:
    """A sentence or two for each layer that stands out, by its place in the report: the largest errors first.

    The error of a layer is its loss divided by the number of operations in it, on held-out samples where there are
    some.
    """
    errors = {place: error for place, layer in enumerate(report["layers"]) if (error := _error(layer)) is not None}
    if not errors:
        return {}
    median = statistics.median(errors.values())
    worst = sorted((place for place in errors if errors[place] > _FACTOR * median), key=lambda place: -errors[place])
    said: set[str] = set()  # layers that were solved together are one finding
    found: dict[int, str] = {}
    for place in worst:
        layer = report["layers"][place]
        if layer["name"] in said or len(found) == _MANY:
            continue
        said.update(layer["group"])
        times = f"{errors[place] / median:.1f}" if median > 0 else "many"
        found[place] = f"Its error is {times} times the median of all layers. {_what_to_do(layer, report['recipe'])}"
    return found


def _error(layer: Data) -> float | None:
    """The error for each operation of its problem. None if the layer was not solved."""
    if not layer["solves"] or layer["horizon"] is None:
        return None
    last = layer["solves"][-1]
    loss: float | None = last["loss"] if last["held_out"] is None else last["held_out"]
    return None if loss is None else loss / (layer["horizon"] + 1)


def _what_to_do(layer: Data, recipe: Data) -> str:
    last = layer["solves"][-1]
    lighter = f'give it a lighter pattern or leave it dense: exclude=["{layer["name"]}"].'
    if last["kept"] != "solved":
        return f"Its solve fitted noise, so {last['kept']} was kept: more calibration samples help, or {lighter}"
    if last["held_out"] is not None and last["loss"] and last["held_out"] > _OVERFITTED * last["loss"]:
        return f"It does worse on held-out samples than on fitted ones: more calibration samples help, or {lighter}"
    steps = last["cg_residuals"][-1] if last["cg_residuals"] else ()
    limit = recipe.get("cg_steps")
    if limit and len(steps) >= limit:
        return f"CG stopped at its limit of {limit} steps: try a recipe with cg_steps={3 * limit}, or {lighter}"
    return lighter[0].upper() + lighter[1:]
