"""Tables of docs/paper.md: what the paper reports beside what was measured here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sections import Row

_NONE = "–"


def table(head: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(_text(cell) for cell in row) + " |" for row in body]
    return "\n".join(lines) + "\n"


def by_recipe(
    rows: Sequence[Row],
    keys: Sequence[str],
    cell: Callable[[Row], object],
    reported: Mapping[Any, object] | None = None,
) -> str:
    """One line for each combination of keys; a column for the paper's figure and one for each recipe."""
    states = [state for state in ("alone", "paper", "snows") if any(row["recipe"] == state for row in rows)]
    titles = {"alone": "mask alone", "paper": "the paper's algorithm", "snows": "default"}
    found: dict[tuple[Any, ...], dict[str, object]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), {})[row["recipe"]] = cell(row)
    paper = [] if reported is None else ["paper"]
    head = [*keys, *paper, *[titles[state] for state in states]]
    body = []
    for key, cells in found.items():
        theirs = [] if reported is None else [reported.get(key, _NONE)]
        body.append([*key, *theirs, *[cells.get(state, _NONE) for state in states]])
    return table(head, body)


def accuracy(row: Row) -> str:
    """Top-1, and what was lost."""
    return f"{row['top1']:.2f} ({row['top1'] - row['dense']:+.2f})"


def cost(row: Row) -> str:
    """Accuracy, time and memory in one cell."""
    memory = row.get("peak_memory_bytes")
    time = f", {row['seconds']:.0f} s" if "seconds" in row else ""
    return f"{row['top1']:.2f}{time}" + (f", {memory / 2**30:.1f} GiB" if memory else "")


def _text(cell: object) -> str:
    return f"{cell:.2f}" if isinstance(cell, float) else _NONE if cell is None else str(cell)
