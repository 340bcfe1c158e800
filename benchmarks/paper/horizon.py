"""The effect of K: accuracy, time and peak memory."""

from __future__ import annotations

from functools import partial

from sections import Row, Section

from .drawing import Line, line_chart
from .setting import RECIPES, Entry, Setting
from .tables import by_recipe, cost

_TO_THE_END = 1000
_HORIZONS = (0, 1, 3, 5, 10, 20, 30, 40, _TO_THE_END)
_SAMPLES = {"resnet20": 3000, "resnet50": 1000}


def rows(setting: Setting) -> Section:
    for network in setting.choose(["resnet20", "resnet50"], ["resnet20"]):
        for name in RECIPES:
            for horizon in setting.choose(_HORIZONS, (0, 3)):
                # The last stage would hide what K does.
                chosen = setting.recipe(name).replace(horizon=horizon, finish_steps=0)
                measure = partial(setting.prune, network, "1:4", chosen, _SAMPLES[network])
                yield {"network": network, "recipe": name, "horizon": horizon}, measure


def draw(found: list[Row]) -> dict[str, str]:
    figures = {}
    for network in dict.fromkeys(row["network"] for row in found):
        of_network = [row for row in found if row["network"] == network and row["horizon"] < _TO_THE_END]
        for key, unit in (("top1", "top-1, %"), ("seconds", "seconds")):
            lines = []
            for name, words in (("paper", "the paper's recipe"), ("snows", "default")):
                mine = sorted((r for r in of_network if r["recipe"] == name and key in r), key=lambda r: r["horizon"])
                lines.append(Line(words, [r["horizon"] for r in mine], [r[key] for r in mine]))
            title = f"{network}, 1:4: {'accuracy' if key == 'top1' else 'time'} against K"
            figures[f"horizon-{network}-{key}"] = line_chart(title, lines, "K", unit, marks=True)
    return figures


# Minutes and GB of the paper, whose machine is not named; for K = 1000, the whole network, it has none.
_REPORTED = {
    ("resnet20", 0): "0.7 min, 2.2 GB", ("resnet20", 1): "0.8 min, 2.5 GB", ("resnet20", 3): "1.6 min, 2.8 GB",
    ("resnet20", 5): "2.3 min, 3.3 GB", ("resnet20", 10): "4.8 min, 3.3 GB", ("resnet20", 20): "8.1 min, 4.3 GB",
    ("resnet20", 30): "11.2 min, 4.9 GB", ("resnet20", 40): "11.8 min, 5.1 GB",
    ("resnet50", 0): "10.5 min, 8.6 GB", ("resnet50", 1): "12.9 min, 15.1 GB", ("resnet50", 3): "25.2 min, 17.3 GB",
    ("resnet50", 5): "39.7 min, 25.8 GB", ("resnet50", 10): "94.8 min, 38.3 GB", ("resnet50", 20): "184 min, 54.0 GB",
    ("resnet50", 30): "290 min, 66.9 GB", ("resnet50", 40): "out of memory",
}  # fmt: skip


def make_table(found: list[Row]) -> str:
    return by_recipe(found, ("network", "horizon"), cost, _REPORTED)


ENTRY = Entry(
    "horizon", "Figure “Effect of varying K” and the table of run-times", rows, minutes=60, gib=80, draw=draw,
    table=make_table,
)  # fmt: skip
