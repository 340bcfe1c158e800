"""What `snows.compare` returns: rows of figures, and the ways to show them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import one_line
from ..words import counted

SCHEMA = 1


@dataclass(frozen=True)
class Row:
    """One network of a comparison. Shares are fractions. None: does not apply, or was not measured."""

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
    error: str | None = None  # why there is no such network

    @property
    def name(self) -> str:
        if self.mask is None:
            return "dense"
        return f"{self.mask}, {self.pattern}, {'with' if self.snows else 'without'} SNOWS"

    def require_same_network(self, other: Row) -> None:
        """Raises ValueError if it is the row of another network than the other one, or no row of figures."""
        if (self.mask, self.pattern, self.snows) != (other.mask, other.pattern, other.snows):
            raise ValueError(f"it is the row of {self.name}; expected {other.name}")
        figures = {key: value for key, value in vars(self).items() if key not in ("mask", "pattern", "snows", "error")}
        odd = [key for key, value in figures.items() if value is not None and type(value) not in (int, float)]
        if odd or not isinstance(self.error, str | None):
            raise ValueError(f"{', '.join(odd) or 'error'} is no figure")


@dataclass(frozen=True)
class Comparison:
    """Networks side by side, as `snows.compare` returns them.

    Attributes:
        settings: What the networks have in common: model, samples, recipe, device, versions and so on.
        rows: The dense network first, then one row for each pattern and mask, without and with SNOWS.
        reused: How many rows an earlier call with the same folder had finished.

    Example:
        >>> import snows, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
        >>> x = torch.randn(64, 8)
        >>> found = snows.compare(model, x, "2:4", "magnitude", layers="*", test=x, progress=False)
        >>> [row.name for row in found.rows]
        ['dense', 'magnitude, 2:4, without SNOWS', 'magnitude, 2:4, with SNOWS']
        >>> masked, adjusted = found.pruned
        >>> masked.sparsity, adjusted.kl < masked.kl
        (0.5, True)
        >>> print(found.to_markdown().splitlines()[0])
        | pattern | mask | SNOWS | agreement | KL | sparsity | time | memory |
    """

    settings: dict[str, Any]
    rows: tuple[Row, ...]
    reused: int = 0

    def __repr__(self) -> str:
        return f"<Comparison: {one_line(self.summary)}; {counted(len(self.rows), 'network')}, see to_markdown()>"

    def _repr_markdown_(self) -> str:
        return self.to_markdown()

    @property
    def pruned(self) -> tuple[Row, ...]:
        """All rows but the dense network's."""
        return tuple(row for row in self.rows if row.mask is not None)

    @property
    def failed(self) -> tuple[Row, ...]:
        """The networks that could not be made."""
        return tuple(row for row in self.rows if row.error is not None)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        return {"schema": SCHEMA, "settings": self.settings, "reused": self.reused, "rows": rows}

    def to_json(self) -> str:
        """Everything as strict JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def to_markdown(self) -> str:
        """The table and its summary in Markdown."""
        header, body = self.table()
        if self.failed:
            header.append("error")
            body = [[*cells, row.error or ""] for cells, row in zip(body, self.rows, strict=True)]
        lines = [header, ["---"] * len(header), *([_escaped(cell) for cell in cells] for cells in body)]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return f"{table}\n\n{_escaped(self.summary)}\n"

    @property
    def summary(self) -> str:
        """One line: the model, the samples, the device and the versions."""
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
        """Titles and cells as text. Figures that no row has are left out; a dash stands for a missing one."""
        columns = [
            (title, key, as_text)
            for title, key, as_text in _COLUMNS
            if key not in _FIGURES or any(getattr(row, key) is not None for row in self.rows)
        ]
        body = [
            [*_row_names(row), *(_or_dash(getattr(row, key), as_text) for _, key, as_text in columns)]
            for row in self.rows
        ]  # fmt: skip
        return ["pattern", "mask", "SNOWS", *(title for title, _, _ in columns)], body


class ComparisonInterrupted(KeyboardInterrupt):
    """The user stopped `snows.compare`. `comparison` holds what was finished."""

    def __init__(self, comparison: Comparison) -> None:
        super().__init__()
        self.comparison = comparison


def kept_networks(comparison: Comparison, folder: str | Path | None, option: str, again: str) -> str:
    """What a comparison that was stopped has kept, and how to go on."""
    finished = f"{counted(len(comparison.pruned), 'network')} finished"
    if folder is None:
        return f"{finished}; {option} keeps finished networks"
    return f"{finished} and kept in {folder}; the same {again} continues"


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


def _or_dash(value: Any, as_text: Callable[[Any], str]) -> str:
    return "–" if value is None else as_text(value)


def _escaped(text: str) -> str:
    """Text for Markdown without its special characters taking effect, also inside a table."""
    return re.sub(r"([\\`*_<|\[\]])", r"\\\1", text)
