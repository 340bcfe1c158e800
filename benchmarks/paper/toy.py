"""The toy problem of the appendix: a quadratic whose two curvatures differ a hundredfold."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sections import Row, Section
from torch import Tensor

from .drawing import Line, line_chart, surface_chart
from .setting import Entry, Setting

_CURVATURE = (1.0, 100.0)
_RATE = 0.01  # that of the steeper direction
_SMALL = 1e-6
_EVERY, _POINTS = 25, 40  # an even number: no point is the minimum, whose logarithm is shown
_NAMES = {"newton": "Newton", "sgd": "SGD"}


def rows(setting: Setting) -> Section:
    yield {"curvature": list(_CURVATURE), "rate": _RATE}, _measure


def _measure() -> Row:
    curvature = torch.tensor(_CURVATURE, dtype=torch.float64)
    steps = {"newton": 1 / curvature, "sgd": torch.full_like(curvature, _RATE)}
    return {name: _path(list(descend(curvature, scale))) for name, scale in steps.items()}


def descend(curvature: Tensor, scale: Tensor) -> Iterator[Tensor]:
    """From (1, 1) by steps of the gradient times `scale`, until both coordinates are small."""
    w = torch.ones_like(curvature)
    yield w
    while w.abs().max() > _SMALL:
        w = w - scale * curvature * w
        yield w


def _path(points: list[Tensor]) -> Row:
    last = len(points) - 1
    shown = sorted({0, 1, *range(0, last, _EVERY), last})
    return {"needed": last, "steps": shown, "points": [points[step].tolist() for step in shown]}


def draw(found: list[Row]) -> dict[str, str]:
    (row,) = found
    paths = {name: row[path] for path, name in _NAMES.items()}
    against = [Line(name, p["steps"], [max(map(abs, point)) for point in p["points"]]) for name, p in paths.items()]
    over = [Line(name, *map(list, zip(*p["points"], strict=True))) for name, p in paths.items()]
    axis = torch.linspace(-1.1, 1.1, _POINTS).tolist()
    one, two = row["curvature"]
    losses = [[0.5 * (one * x * x + two * y * y) for x in axis] for y in axis]
    return {
        "toy-steps": line_chart("Toy problem: distance against steps", against, "steps", "largest coordinate"),
        "toy-surface": surface_chart(
            "Toy problem: the way to the minimum", {"x": axis, "y": axis, "losses": losses}, over, "w1", "w2"
        ),
    }


def make_table(found: list[Row]) -> str:
    (row,) = found
    return f"Steps needed: SGD {row['sgd']['needed']:,}, Newton {row['newton']['needed']}."


ENTRY = Entry("toy", "Figure of the toy problem", rows, minutes=0.1, gib=0, draw=draw, table=make_table)
