"""The page of a sensitivity: one small chart for each layer, all on the same axes, and a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..results.templates import read_template

_WIDTH, _HEIGHT = 230, 130  # of the area inside the axes
_LOWEST, _HIGHEST = 1e-4, 10.0  # errors on the logarithmic axis

Data = Mapping[str, Any]


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    title: str


@dataclass(frozen=True)
class Chart:
    """The curves of one layer: of sparsities, and single points of other patterns."""

    name: str
    masked: list[Point]
    readjusted: list[Point]
    others: list[tuple[Point, Point]]  # mask only and re-adjusted

    @classmethod
    def of(cls, layer: Data) -> Chart:
        curve = sorted((level for level in layer["levels"] if level["unstructured"]), key=lambda e: e["sparsity"])
        others = [level for level in layer["levels"] if not level["unstructured"]]
        return cls(
            layer["name"],
            [_point(level, "mask_only") for level in curve],
            [_point(level, "readjusted") for level in curve],
            [(_point(level, "mask_only"), _point(level, "readjusted")) for level in others],
        )


def _point(level: Data, state: str) -> Point:
    words = "mask only" if state == "mask_only" else "re-adjusted"
    figures = ", ".join(f"{title} {text}" for title, text in figures_of(level[state]))
    return Point(
        round(_WIDTH * level["sparsity"], 1), _height(level[state]["error"]), f"{level['pattern']}, {words}: {figures}"
    )


def _height(error: float | None) -> float:
    """Where an error is drawn; what is not finite is at the top."""
    shown = _HIGHEST if error is None else min(max(error, _LOWEST), _HIGHEST)
    return round(_HEIGHT * (1 - math.log(shown / _LOWEST) / math.log(_HIGHEST / _LOWEST)), 1)


def figures_of(effect: Data) -> Iterator[tuple[str, str]]:
    """Titles and figures that there are, as text."""
    error = effect["error"]
    yield "error", "–" if error is None else f"{error:.2%}"
    if effect["kl"] is not None:
        yield "KL", f"{effect['kl']:.3f}"
        yield "agreement", f"{effect['agreement']:.1%}"
    if effect["accuracy"] is not None:
        yield "accuracy", f"{effect['accuracy']:.1%}"


def render(data: Data) -> str:
    """The page for the data of a `Sensitivity`. Names in it are escaped."""
    template = read_template(__package__, "sensitivity.html.j2")
    lines = [(text, _height(value)) for text, value in (("0.01 %", 1e-4), ("1 %", 1e-2), ("100 %", 1.0))]
    return template.render(
        data=data, charts=[Chart.of(layer) for layer in data["layers"]], lines=lines, width=_WIDTH, height=_HEIGHT,
        figures_of=figures_of, shade=shade,
    )  # fmt: skip


def shade(error: float | None) -> int:
    """How dark a cell of the table is, in percent: the higher the error, the darker."""
    return round(60 * (1 - _height(error) / _HEIGHT))
