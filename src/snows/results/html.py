"""The report as a page: one file, light or dark as the reader prefers, which needs nothing from a network.

The charts are small SVGs that the page draws from the data inside it (page/charts.js, page/report.js). They are drawn
there and not here because a click on a layer opens its charts: drawn in advance for every layer, they would be most of
the file. A library of charts would be 1 MB or more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Template

from .advice import advice
from .figures import figure, is_share, measure_title, measured, memory, percent, time_taken
from .headline import began_in_closed_form, cards, rows, subtitle, title
from .templates import read_template

Data = Mapping[str, Any]

_COLORS = {"dense": "--dense", "mask only": "--masked"}


def render(report: Data, refresh: float | None = None) -> str:
    """The page for the data of a report, as `Report.to_dict` gives it. Names and words in it are escaped.

    While the run has not finished, a browser reads it again after `refresh` seconds.
    """
    found = advice(report)
    layers = report["layers"]
    return _template().render(
        report=report, refresh=refresh, title=title(report), subtitle=subtitle(report), finished=_finished(report),
        progress=_progress(report),
        cards=cards(report), advice=found, evaluation=_Evaluation(report["evaluation"]),
        solved=any(_loss_known(layer) for layer in layers),
        closed_form=any(began_in_closed_form(solve) for layer in layers for solve in layer["solves"]),
        rows=rows(report, found),
        sweeps=_sweeps(report), opened=next(iter(found), 0), facts=_facts(report), color=_color,
        loss_words=_loss_words(report), finish_words=_finish_words(report), operation_words=_operation_words(report),
        retraining_words=_retraining_words(report),
        style=_asset("report.css"), charts=_asset("charts.js"), script=_asset("report.js"),
    )  # fmt: skip


@cache
def _template() -> Template:
    return read_template(
        __package__,
        "page",
        "report.html.j2",
        figure=figure,
        percent=percent,
        title_of_measure=measure_title,
        measured=measured,
    )


@cache
def _read(name: str) -> str:
    return files(__package__).joinpath("page", name).read_text(encoding="utf-8")


def _asset(name: str) -> Any:
    from markupsafe import Markup

    return Markup(_read(name))  # our own file


def _finished(report: Data) -> bool:
    """Whether the last thing that was begun has ended: the run, or a retraining after it."""
    last = report["retraining"] or report
    return bool(last["finished"])


def _progress(report: Data) -> str:
    done = report["retraining"]
    if done is not None:
        return f"{max(0, len(done['history']) - 1)} of {done['settings']['epochs']} epochs of retraining"
    solved = sum(bool(layer["solves"]) for layer in report["layers"])
    return f"{solved} of {len(report['layers'])} layers solved at least once"


class _Evaluation:
    """The columns of the table of evaluations, and the color of each network."""

    def __init__(self, rows: list[Data]) -> None:
        self.columns = [_Column(key) for key in (rows[0] if rows else ())]

    def color(self, row: Data) -> str:
        return _color(str(row.get("network")))


@dataclass(frozen=True)
class _Column:
    key: str

    @property
    def title(self) -> str:
        return measure_title(self.key)

    @property
    def share(self) -> bool:
        return is_share(self.key)

    def text(self, row: Data) -> str:
        return measured(self.key, row.get(self.key))


def _color(name: str) -> str:
    """Of a network's name: the same in all tables and charts."""
    return _COLORS.get(name, "--layerwise" if name.startswith("layer-wise") else "--snows")


def _loss_known(layer: Data) -> bool:
    return bool(layer["solves"]) and layer["solves"][-1]["loss"] is not None


def _loss_words(report: Data) -> str:
    return (
        "How far the layer and the K operations after it are from the dense network, on the fitted samples. Lower is "
        "better; the axis is logarithmic. Layers before it are re-adjusted already. A click opens a layer."
        + ("" if _sweeps(report) < 2 else " From the second sweep on all layers are pruned, so that losses are higher.")
    )


def _sweeps(report: Data) -> int:
    return max((len(layer["solves"]) for layer in report["layers"]), default=0)


def _operation_words(report: Data) -> str:
    operations = report["operations"]
    if not operations:
        return ""
    return (
        f"Mean squared error of each operation's output, as a share of its variance in the dense network, on "
        f"{operations['samples']} calibration samples. Operations in order of execution; the axis is logarithmic."
    )


def _finish_words(report: Data) -> str:
    finish = report["finish"]
    if finish is None:
        return ""
    samples = "held-out" if report["held_out_samples"] else "fitted"
    before, after = figure(finish["loss_before"]), figure(finish["loss"])
    return (
        f"All kept weights trained together for {finish['steps']:,} steps ({time_taken(finish['seconds'])}). Loss of "
        f"the {samples} samples: {before} before, {after} at the best point, which was kept."
    )


def _retraining_words(report: Data) -> str:
    done = report["retraining"]
    if done is None:
        return ""
    lesson = f"the predictions of the dense {done['teacher']}, without labels" if done["teacher"] else "labels"
    kept = f"epoch {done['best_epoch']}" if done["best_epoch"] else "before, as no epoch was better"
    return (
        f"Trained on {lesson}, with the masks as they are. Kept are the weights of {kept}: the best "
        f"{measure_title(done['measure'])} of {done['held_out_samples']:,} held-out samples."
    )


def _facts(report: Data) -> list[tuple[str, str]]:
    """Names and values that decide a result."""
    facts = {
        "pattern": report["pattern"],
        "masks": report["mask"],
        "calibration samples": f"{report['samples']:,}, {report['held_out_samples']:,} of them held out",
        "seed": str(report["seed"]),
        "device": report["device"],
        "versions": ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
    }
    if report["permutation"]:
        before, after = report["permutation"]["kept_before"], report["permutation"]["kept_after"]
        facts["channels re-ordered"] = f"N:M masks keep {percent(after)} of the magnitude instead of {percent(before)}"
    if report["recalled_solves"]:
        facts["solved by an earlier call"] = f"{report['recalled_solves']} solves, whose time is not in this report"
    if report["expected_memory_bytes"]:
        facts["memory expected"] = memory(report["expected_memory_bytes"])
    return list(facts.items())
