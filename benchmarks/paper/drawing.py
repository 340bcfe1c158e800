"""Line charts and loss surfaces as SVG, on light and dark pages. Nothing is loaded from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 560, 300
_LEFT, _TOP, _RIGHT, _BOTTOM = 64, 34, 150, 44
_STYLE = """
:root { color-scheme: light dark } svg { background: #fff }
text { font: 12px system-ui, sans-serif; fill: #333 } .title { font-weight: 600; font-size: 13px }
.axis { stroke: #888; fill: none } .grid { stroke: #e4e4e4; fill: none }
.s0 { color: #0b6bcb } .s1 { color: #c2571a } .s2 { color: #3c8c4a } .s3 { color: #8a4fbf }
.s4 { color: #b03060 } .s5 { color: #7a6a00 } .s6 { color: #00808a } .s7 { color: #555 }
path.line { stroke: currentColor; stroke-width: 2; fill: none } circle { fill: currentColor }
@media (prefers-color-scheme: dark) {
  svg { background: #131416 }
  text { fill: #ddd } .grid { stroke: #3a3a3a } .s0 { color: #6cb4ff } .s1 { color: #ff9f5a } .s2 { color: #7fd08d }
  .s3 { color: #c79bff } .s4 { color: #ff88b0 } .s5 { color: #d9c64a } .s6 { color: #5cd0da } .s7 { color: #bbb }
}
"""
_COLOURS = 8


@dataclass(frozen=True)
class Line:
    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class _Axis:
    """From numbers to pixels."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, logarithmic: bool) -> _Axis:
        low, high = min(values), max(values)
        if not logarithmic:
            low = min(low, 0.0) if low < 0.5 * high else low - 0.08 * (high - low)
        return cls(low, high if high > low else low + 1, start, end, logarithmic)

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        return round(self.start + (self.end - self.start) * (value - low) / (high - low), 1)

    def ticks(self) -> list[float]:
        if self.logarithmic:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            powers = [10.0**power for power in range(first, last + 1)]
            return powers if len(powers) > 1 else [self.low, self.high]
        step = 10 ** math.floor(math.log10((self.high - self.low) / 2))
        for factor in (1, 2, 5, 10):
            if (self.high - self.low) / (step * factor) <= 5:
                step *= factor
                break
        return [step * k for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def line_chart(
    title: str, lines: Sequence[Line], x: str, y: str, log_x: bool = False, log_y: bool = False, marks: bool = False
) -> str:
    """One chart. On a logarithmic axis, points that are not above zero are left out."""

    def shown(a: float, b: float) -> bool:
        return math.isfinite(a) and math.isfinite(b) and (a > 0 or not log_x) and (b > 0 or not log_y)

    kept = [Line(s.name, *_columns([(a, b) for a, b in zip(s.x, s.y, strict=True) if shown(a, b)])) for s in lines]
    kept = [line for line in kept if line.x]
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    across = _Axis.over([v for line in kept for v in line.x], _LEFT, right, log_x)
    up = _Axis.over([v for line in kept for v in line.y], bottom, _TOP, log_y)
    parts = _frame(title, x, y, across, up)
    for index, line in enumerate(kept):
        points = [(across(a), up(b)) for a, b in zip(line.x, line.y, strict=True)]
        path = "M" + "L".join(f"{a},{b}" for a, b in points)
        dots = "".join(f'<circle cx="{a}" cy="{b}" r="3"/>' for a, b in points) if marks else ""
        height = _TOP + 8 + 18 * index
        parts.append(
            f'<g class="s{index % _COLOURS}"><path class="line" d="{path}"/>{dots}'
            f'<path class="line" d="M{right + 12},{height}h18"/></g>'
            f'<text x="{right + 36}" y="{height + 4}">{escape(line.name)}</text>'
        )
    return _svg(parts)


def surface_chart(
    title: str,
    grid: dict[str, list[float] | list[list[float]]],
    paths: Sequence[Line],
    x: str = "largest weight",
    y: str = "second largest weight",
) -> str:
    """The loss over two weights: the lighter, the higher. Paths are drawn over it."""
    xs, ys, losses = grid["x"], grid["y"], grid["losses"]
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    across = _Axis(xs[0], xs[-1], _LEFT, right, False)
    up = _Axis(ys[0], ys[-1], bottom, _TOP, False)
    logs = [[math.log(max(value, 1e-12)) for value in row] for row in losses]
    low, high = min(map(min, logs)), max(map(max, logs))
    width, height = (right - _LEFT) / (len(xs) - 1), (bottom - _TOP) / (len(ys) - 1)
    parts = []
    for j, row in enumerate(logs[:-1]):
        for i, value in enumerate(row[:-1]):
            share = (value - low) / ((high - low) or 1)
            parts.append(
                f'<rect x="{across(xs[i])}" y="{up(ys[j + 1])}" width="{width + 0.5:.1f}" height="{height + 0.5:.1f}" '
                f'fill="hsl(215 45% {25 + 60 * share:.0f}%)"/>'
            )
    parts += _frame(title, x, y, across, up, grid=False)
    for index, line in enumerate(paths):
        points = [(across(a), up(b)) for a, b in zip(line.x, line.y, strict=True)]
        path = "M" + "L".join(f"{a},{b}" for a, b in points)
        legend = _TOP + 8 + 18 * index
        parts.append(
            f'<g style="color: {("#ffd23f", "#ff5d5d")[index % 2]}"><path class="line" d="{path}"/>'
            f'<circle cx="{points[-1][0]}" cy="{points[-1][1]}" r="4"/>'
            f'<path class="line" d="M{right + 12},{legend}h18"/></g>'
            f'<text x="{right + 36}" y="{legend + 4}">{escape(line.name)}</text>'
        )
    return _svg(parts)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [a for a, _ in points], [b for _, b in points]


def _frame(title: str, x: str, y: str, across: _Axis, up: _Axis, grid: bool = True) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [f'<text class="title" x="{_LEFT}" y="18">{escape(title)}</text>']
    for value in across.ticks():
        parts.append(f'<text x="{across(value)}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>')
    for value in up.ticks():
        if grid:
            parts.append(f'<path class="grid" d="M{_LEFT},{up(value)}H{right}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{up(value) + 4}" text-anchor="end">{value:g}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT},{_TOP}V{bottom}H{right}"/>')
    middle = (_LEFT + right) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>')
    parts.append(
        f'<text transform="translate(14 {(_TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">{escape(y)}</text>'
    )
    return parts


def _svg(parts: Sequence[str]) -> str:
    return picture(parts, _WIDTH, _HEIGHT)


def picture(parts: Sequence[str], width: int, height: int) -> str:
    """An SVG file of these parts, with the colours of all charts."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">\n<style>{_STYLE}</style>\n{body}\n</svg>\n'
    )
