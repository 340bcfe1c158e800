"""What `snows.compare` gives: plain rows, and the ways to show them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SCHEMA = 1


@dataclass(frozen=True)
class Row:
    """One network of a comparison. Shares are fractions; None is what does not apply or was not measured."""

    mask: str | None  # None: the dense network
    pattern: str | None
    snows: bool
    top1: float | None = None
    top5: float | None = None
    loss: float | None = None
    perplexity: float | None = None  # of a language model
    agreement: float | None = None
    kl: float | None = None  # divergence from the dense predictions
    drop: float | None = None  # top-1 of the dense network minus this one's
    sparsity: float | None = None  # of the pruned layers
    network_sparsity: float | None = None  # of the whole network
    seconds: float | None = None  # to prune; evaluation is not counted
    peak_memory_bytes: int | None = None  # of the accelerator; not measured on a CPU
    error: str | None = None  # why it failed

    @property
    def name(self) -> str:
        if self.mask is None:
            return "dense"
        return f"{self.mask}, {self.pattern}, {'with' if self.snows else 'without'} SNOWS"


@dataclass(frozen=True)
class Comparison:
    """The dense network first, then a row for each pattern, mask, and without or with SNOWS."""

    settings: dict[str, Any]
    rows: tuple[Row, ...]
    reused: int = 0  # rows that were finished by an earlier run

    @property
    def pruned(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.mask is not None)

    @property
    def failed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.error is not None)

    def to_dict(self) -> dict[str, Any]:
        rows = [dataclasses.asdict(row) for row in self.rows]
        return {"schema": SCHEMA, "settings": self.settings, "reused": self.reused, "rows": rows}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def to_markdown(self) -> str:
        header, body = self.table()
        if self.failed:
            header.append("error")
            body = [[*cells, row.error or ""] for cells, row in zip(body, self.rows, strict=True)]
        lines = [header, ["---"] * len(header), *([_plain(cell) for cell in cells] for cells in body)]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return f"{table}\n\n{_plain(self.summary)}\n"

    @property
    def summary(self) -> str:
        """What was compared, in a line."""
        facts = self.settings
        if facts["test_samples"] == 0:
            tested = "no test samples"
        else:
            tested = f"{facts['test_samples']} test samples{'' if facts['test_labels'] else ' without labels'}"
        return (
            f"{facts['model']}: {facts['samples']} calibration samples, {tested}; {facts['device']}, "
            f"seed {facts['seed']}, snows {facts['versions']['snows']}, torch {facts['versions']['torch']}"
        )

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Titles and cells as text. Figures that no row has are left out; a dash is what one row does not have."""
        shown = [
            (title, key, show)
            for title, key, show in _COLUMNS
            if key not in _FIGURES or any(getattr(row, key) is not None for row in self.rows)
        ]
        body = [
            [*_row_names(row), *(_or_dash(getattr(row, key), show) for _, key, show in shown)]
            for row in self.rows
        ]  # fmt: skip
        return ["pattern", "mask", "SNOWS", *(title for title, _, _ in shown)], body


class ComparisonInterrupted(KeyboardInterrupt):
    """The user stopped the run; `comparison` holds what was finished."""

    def __init__(self, comparison: Comparison) -> None:
        super().__init__()
        self.comparison = comparison


def _percent(value: float) -> str:
    return f"{value:.2%}"


def _four_digits(value: float) -> str:
    return f"{value:.4f}"


_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("top-1", "top1", _percent),
    ("drop", "drop", _percent),
    ("top-5", "top5", _percent),
    ("loss", "loss", _four_digits),
    ("perplexity", "perplexity", lambda value: f"{value:.2f}"),
    ("agreement", "agreement", _percent),
    ("KL", "kl", _four_digits),
    ("sparsity", "sparsity", _percent),
    ("time", "seconds", lambda seconds: f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"),
    ("memory", "peak_memory_bytes", lambda size: f"{size / 2**30:.1f} GiB"),
)
_FIGURES = {"top1", "drop", "top5", "loss", "perplexity", "agreement", "kl"}


def _row_names(row: Row) -> list[str]:
    if row.mask is None:
        return ["dense", "–", "–"]
    return [str(row.pattern), row.mask, "yes" if row.snows else "no"]


def _or_dash(value: Any, show: Callable[[Any], str]) -> str:
    return "–" if value is None else show(value)


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, also inside a table."""
    return re.sub(r"([\\`*_<|\[\]])", r"\\\1", text)
