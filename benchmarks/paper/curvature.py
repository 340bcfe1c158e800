"""The exact Hessian against the empirical Fisher matrix, layer by layer."""

from __future__ import annotations

from functools import partial

from sections import Row, Section

from snows.solve.objective import CurvatureKind

from .drawing import Line, line_chart
from .paths import SAMPLES, newton_path, prunable_layers, start_at
from .setting import Entry, Setting

_HORIZON = 10
_BATCH = 250
_STEPS, _CG_STEPS, _SECONDS = 20, 50, 20.0
_LAYERS = {"resnet20": None, "resnet50": 3}  # the first so many; None: all
_KINDS: dict[CurvatureKind, str] = {"hessian": "exact Hessian", "fisher": "Fisher"}


def rows(setting: Setting) -> Section:
    for network in setting.choose(list(_LAYERS), ["resnet20"]):
        for layer in prunable_layers(setting, network, _HORIZON)[: 2 if setting.quick else _LAYERS[network]]:
            what = {"network": network, "layer": layer, "horizon": _HORIZON, "samples": setting.count(SAMPLES)}
            yield what, partial(_measure, setting, network, layer)


def _measure(setting: Setting, network: str, layer: str) -> Row:
    start, steps = start_at(setting, network, layer, _HORIZON, _BATCH), 2 if setting.quick else _STEPS
    found = {}
    for kind in _KINDS:
        path = newton_path(start, kind, steps, _CG_STEPS, _SECONDS).row()
        found[kind] = {key: path[key] for key in ("seconds", "steps", "losses")}
    return found


def draw(found: list[Row]) -> dict[str, str]:
    figures = {}
    for row in found:
        for x, words in (("seconds", "time"), ("steps", "steps")):
            lines = [Line(name, row[kind][x], row[kind]["losses"]) for kind, name in _KINDS.items()]
            title = f"{row['network']}, {row['layer']}: K-step loss against {words}"
            figures[f"curvature-{row['network']}-{row['layer']}-{x}"] = line_chart(
                title, lines, x, "loss, share of the start's", log_y=True, marks=True
            )
    return figures


ENTRY = Entry("curvature", "Figure “Newton's method and the Fisher approximation”", rows, minutes=15, gib=30, draw=draw)
