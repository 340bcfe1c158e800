"""A report in short: one line, a table as text, and a table for notebooks."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import Template
from rich import box
from rich.console import Console
from rich.table import Table

from .. import errors
from ..words import counted
from .advice import advice
from .figures import figure, percent
from .headline import Row, cards, rows, subtitle, title
from .templates import read_template

Data = Mapping[str, Any]

_WIDTH = 120
_COLUMNS = ("layer", "shape", "pattern", "removed", "K", "mask only", "re-adjusted", "at the end", "held out")
_TEXTS = 3  # of these columns; the others are numbers


def one_line(report: Data) -> str:
    """Such as "ResNet20 pruned to 2:4, 20 layers, 50.0 % removed"."""
    removed = f"{percent(report['sparsity'])} removed" if report["finished"] else "not finished"
    return errors.one_line(f"{title(report)}, {counted(len(report['layers']), 'layer')}, {removed}")


def as_text(report: Data) -> str:
    """The headline, a table of the layers, and what to look at."""
    found = advice(report)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if number < _TEXTS else "right", no_wrap=number > 0, overflow="fold")
    for row in rows(report, found):
        table.add_row(*map(errors.one_line, _cells(row, report["finished"])))
    console = Console(
        file=io.StringIO(), width=_WIDTH, color_system=None, markup=False, highlight=False, emoji=False,
        force_jupyter=False,  # it would show the table by itself
    )  # fmt: skip
    console.print(table)
    lines = [title(report), subtitle(report), ""]
    for card in cards(report):
        value = f"{card.before} → {card.value}" if card.before else card.value
        lines.append(f"{card.title}: {value} ({card.note})")
    looks = [f"{report['layers'][place]['name']}: {said}" for place, said in found.items()]
    text = "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]
    return "\n".join([*map(errors.one_line, lines), "", text, *([""] if looks else []), *map(errors.one_line, looks)])


def as_html(report: Data) -> str:
    """The same as a piece of HTML without styles of its own, as notebooks show it. Names in it are escaped."""
    lines = [_cells(row, report["finished"]) for row in rows(report, advice(report))]
    return _template().render(
        title=title(report), subtitle=subtitle(report), cards=cards(report), columns=_COLUMNS, lines=lines, texts=_TEXTS
    )


def _cells(row: Row, finished: bool) -> list[str]:
    layer = row.layer
    numbers = (layer["horizon"], row.masked, row.readjusted, row.loss, row.held_out)
    removed = percent(layer["sparsity"]) if finished else ""
    return [
        layer["name"], " × ".join(map(str, layer["shape"])), layer["pattern"], removed,
        *(figure(number) for number in numbers),
    ]  # fmt: skip


@cache
def _template() -> Template:
    return read_template(__package__, "page", "notebook.html.j2")
