"""The two main charts of the report as a figure of matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .headline import began_in_closed_form, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"mask only": "#c2571a", "SNOWS": "#1668b8"}  # those of the page
_OTHER = "#6f7f45"


def plot(report: Mapping[str, Any]) -> Figure:
    """Losses of every layer, and errors of every operation where they were measured."""
    try:
        import matplotlib  # noqa: F401  # the next import would hide which module is missing
    except ImportError as error:
        raise InputError("matplotlib is needed to plot; install it with: pip install 'snows[plot]'") from error
    from .shown_figure import ShownFigure

    operations = report["operations"]
    figure = ShownFigure(figsize=(9, 6.5 if operations else 3.5), layout="constrained")
    axes = figure.subplots(2 if operations else 1, squeeze=False)[:, 0]
    _losses(axes[0], report["layers"])
    axes[0].set_title(title(report))
    if operations:
        _errors(axes[1], operations)
    for part in axes:
        part.set_yscale("log")
        part.grid(axis="y", alpha=0.3)
        part.spines[["top", "right"]].set_visible(False)
        part.legend(frameon=False)
    return figure


def _losses(axes: Axes, layers: list[Mapping[str, Any]]) -> None:
    solved = [layer for layer in layers if layer["solves"] and layer["solves"][0]["loss"] is not None]
    before = [layer["solves"][0]["loss_masked"] for layer in solved]
    after = [layer["solves"][0]["loss"] for layer in solved]
    places = range(len(solved))
    axes.vlines(places, before, after, color="0.8", zorder=0)
    axes.plot(places, before, "o", color=_COLORS["mask only"], label="mask only")
    first = [(place, layer["solves"][0]) for place, layer in enumerate(solved)]
    closed = [(place, solve["loss_start"]) for place, solve in first if began_in_closed_form(solve)]
    if closed:
        axes.plot(*zip(*closed, strict=True), "o", color=_OTHER, label="closed form: layer-wise")
    axes.plot(places, after, "o", color=_COLORS["SNOWS"], label="re-adjusted by SNOWS")
    axes.set_ylabel("K-step loss of a layer, first sweep")
    axes.set_xticks(places, [layer["name"] for layer in solved], rotation=60, ha="right", fontsize=7)


def _errors(axes: Axes, operations: Mapping[str, Any]) -> None:
    for name, errors in operations["errors"].items():
        style = "--" if name.startswith("before") else "-"
        color = _COLORS.get(name, _COLORS["SNOWS"] if style == "--" else _OTHER)
        axes.plot(errors, style, color=color, label=name)
    axes.set_ylabel("error of an operation / variance")
    axes.set_xlabel("operations, in order of execution")
