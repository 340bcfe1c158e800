"""Unstructured sparsity: one-shot methods alone, and SNOWS from magnitude masks."""

from __future__ import annotations

from functools import partial

from sections import Row, Section

from .drawing import Line, line_chart
from .setting import RECIPES, Entry, Setting
from .tables import accuracy, table

_SPARSITIES = {"resnet20": (0.5, 0.6, 0.7, 0.8, 0.9), "mobilenet": (0.5, 0.6, 0.7, 0.8)}
_ALONE = ("magnitude", "woodfisher", "cbs", "chita", "falcon")
_SAMPLES = 1000


def rows(setting: Setting) -> Section:
    for network in setting.choose(list(_SPARSITIES), ["resnet20"]):
        for sparsity in setting.choose(_SPARSITIES[network], (0.7,)):
            cells = [(mask, "alone") for mask in _ALONE] + [("magnitude", recipe) for recipe in RECIPES]
            for mask, name in cells:
                measure = partial(setting.prune, network, str(sparsity), setting.recipe(name), _SAMPLES, mask)
                yield {"network": network, "sparsity": sparsity, "mask": mask, "recipe": name}, measure


def draw(found: list[Row]) -> dict[str, str]:
    figures = {}
    words = {"paper": "SNOWS, paper's recipe", "snows": "SNOWS, default"}
    for network in dict.fromkeys(row["network"] for row in found):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in (row for row in found if row["network"] == network):
            name = words.get(row["recipe"], row["mask"])
            lines.setdefault(name, []).append((row["sparsity"], row["top1"]))
        drawn = [Line(name, *(list(c) for c in zip(*sorted(points), strict=True))) for name, points in lines.items()]
        title = f"{network}: accuracy against sparsity"
        figures[f"unstructured-{network}"] = line_chart(title, drawn, "sparsity", "top-1, %", marks=True)
    return figures


_REPORTED = {  # points lost in the paper: MP, WoodFisher, CBS, CHITA, FALCON, SNOWS
    ("resnet20", 0.5): (-2.92, -1.13, -0.78, -0.76, -0.49, -0.28),
    ("resnet20", 0.6): (-6.12, -3.40, -2.48, -2.14, -1.69, -0.66),
    ("resnet20", 0.7): (-12.57, -10.31, -9.52, -7.24, -6.94, -1.69),
    ("resnet20", 0.8): (-37.35, -28.73, -40.08, -33.46, -26.19, -4.74),
    ("resnet20", 0.9): (-79.57, -79.87, -77.68, -75.76, -72.22, -27.76),
    ("mobilenet", 0.5): (-9.34, -3.04, -1.74, -1.53, -1.60, -0.79),
    ("mobilenet", 0.6): (-30.01, -11.05, -5.58, -4.65, -4.77, -2.19),
    ("mobilenet", 0.7): (-65.17, -42.59, -16.84, -12.55, -13.55, -5.61),
    ("mobilenet", 0.8): (-71.84, -71.71, -55.57, -42.17, -46.13, -16.06),
}


def make_table(found: list[Row]) -> str:
    """Accuracy and points lost; in a second line those that the paper reports."""
    cells = [*[(mask, "alone") for mask in _ALONE], ("magnitude", "paper"), ("magnitude", "snows")]
    body: list[list[object]] = []
    for network, sparsity in dict.fromkeys((row["network"], row["sparsity"]) for row in found):
        mine = {(r["mask"], r["recipe"]): r for r in found if (r["network"], r["sparsity"]) == (network, sparsity)}
        body.append([network, f"{sparsity}", *[accuracy(mine[c]) if c in mine else None for c in cells]])
        lost = [f"{points:+.2f}" for points in _REPORTED[network, sparsity]]
        body.append(["", "paper", *lost, ""])
    head = ["network", "sparsity", "MP", "WoodFisher", "CBS", "CHITA", "FALCON", "SNOWS, the paper's", "SNOWS, default"]
    return table(head, body)


ENTRY = Entry(
    "unstructured", "Figure “One-shot methods” and its raw numbers", rows, minutes=40, gib=80, draw=draw,
    table=make_table,
)  # fmt: skip
