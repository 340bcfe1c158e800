"""How many CG steps a Newton step should take at most: 5 to 500."""

from __future__ import annotations

from functools import partial

from sections import Row, Section

from .drawing import Line, line_chart
from .paths import SAMPLES, newton_path, start_at
from .setting import Entry, Setting

_HORIZON = 10
_BATCH = 100
_CAPS = (5, 10, 20, 50, 100, 200, 500)
_STEPS = 20
_LAYERS = {"resnet20": ("layer1.0.conv1", "layer3.2.conv2"), "resnet50": ("layer1.0.conv2", "layer3.0.conv2")}


def rows(setting: Setting) -> Section:
    for network in setting.choose(list(_LAYERS), ["resnet20"]):
        for layer in setting.choose(_LAYERS[network], ["layer1.0.conv1"]):
            for cap in setting.choose(_CAPS, (5, 20)):
                what = {"network": network, "layer": layer, "cap": cap, "samples": setting.count(SAMPLES)}
                yield what, partial(_measure, setting, network, layer, cap)


def _measure(setting: Setting, network: str, layer: str, cap: int) -> Row:
    start = start_at(setting, network, layer, _HORIZON, _BATCH)
    path = newton_path(start, "gauss-newton", 2 if setting.quick else _STEPS, cap).row()
    return {key: path[key] for key in ("seconds", "steps", "losses")}


def draw(found: list[Row]) -> dict[str, str]:
    figures = {}
    for network, layer in dict.fromkeys((row["network"], row["layer"]) for row in found):
        mine = [row for row in found if (row["network"], row["layer"]) == (network, layer)]
        for x in ("seconds", "steps"):
            lines = [Line(f"CG {row['cap']}", row[x], row["losses"]) for row in mine]
            title = f"{network}, {layer}: loss against {x}"
            figures[f"cg-caps-{network}-{layer}-{x}"] = line_chart(title, lines, x, "normalized loss", marks=True)
    return figures


ENTRY = Entry("cg_caps", "Figure “Effect of the number of CG iterations”", rows, minutes=8, gib=20, draw=draw)
