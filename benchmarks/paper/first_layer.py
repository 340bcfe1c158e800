"""SGD against Newton's method on the first prunable layer: K=10, 2:4, magnitude mask."""

from __future__ import annotations

from functools import partial

from sections import Row, Section

from .drawing import Line, line_chart, surface_chart
from .paths import SAMPLES, best_rate, newton_path, sgd_path, start_at, surface
from .setting import Entry, Setting
from .tables import table

_HORIZON = 10
_BATCH = 250
_NEWTON_STEPS = {"resnet20": 6, "resnet50": 13}
_SGD_STEPS, _CG_STEPS = 2000, 200


def rows(setting: Setting) -> Section:
    for network in setting.choose(list(_NEWTON_STEPS), ["resnet20"]):
        what = {"network": network, "horizon": _HORIZON, "samples": setting.count(SAMPLES)}
        yield what, partial(_measure, setting, network)


def _measure(setting: Setting, network: str) -> Row:
    start = start_at(setting, network, None, _HORIZON, _BATCH)
    newton = newton_path(start, "gauss-newton", _NEWTON_STEPS[network], _CG_STEPS)
    steps = 40 if setting.quick else _SGD_STEPS
    rate = best_rate(start, steps // 10)
    sgd = sgd_path(start, steps, rate)
    return {
        "layer": start.problem.layers[0].name, "rate": rate, "newton": newton.row(), "sgd": sgd.row(),
        "surface": surface(start, [newton, sgd], 5 if setting.quick else 21, _BATCH),
    }  # fmt: skip


def draw(found: list[Row]) -> dict[str, str]:
    figures = {}
    for row in found:
        network = row["network"]
        for key, words in (("losses", "loss, share of the start's"), ("distances", "relative distance from the start")):
            for x in ("seconds", "steps"):
                lines = [Line(name, row[path][x], row[path][key]) for path, name in _PATHS.items()]
                title = f"{network}, {row['layer']}: {key} against {x}"
                figures[f"first-layer-{network}-{key}-{x}"] = line_chart(
                    title, lines, x, words, log_x=True, log_y=key == "losses"
                )
        two = [Line(name, *map(list, zip(*row[path]["largest"], strict=True))) for path, name in _PATHS.items()]
        title = f"{network}, {row['layer']}: loss along the two largest weights"
        figures[f"first-layer-{network}-surface"] = surface_chart(title, row["surface"], two)
    return figures


def _table(found: list[Row]) -> str:
    """The end of both, and how soon Newton's method is where gradient descent ends."""
    body = []
    for row in found:
        newton, sgd = row["newton"], row["sgd"]
        end = [
            f"{path['losses'][-1]:.4f}, {path['steps'][-1]:,} steps, {path['seconds'][-1]:.1f} s"
            for path in (newton, sgd)
        ]
        sooner = next((i for i, loss in enumerate(newton["losses"]) if loss <= sgd["losses"][-1]), None)
        there = "never" if sooner is None else f"{newton['steps'][sooner]} steps, {newton['seconds'][sooner]:.1f} s"
        body.append([row["network"], f"`{row['layer']}`", *end, there])
    return table(["network", "layer", "Newton-CG", "SGD", "Newton-CG reaches SGD's last loss in"], body)


_PATHS = {"newton": "Newton-CG", "sgd": "SGD"}
ENTRY = Entry("first_layer", "Figures “SGD against Newton”", rows, minutes=4, gib=20, draw=draw, table=_table)
