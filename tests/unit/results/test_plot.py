"""The charts of a report by matplotlib."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

import snows
from snows.events import OperationErrors
from snows.results.report import fold
from tests.unit.results.test_report import RUN

ERRORS = {"mask only": (0.5, 1.0), "before the last stage": (0.1, 0.2), "SNOWS": (0.1, 0.15), "other": (0.2, 0.3)}


def test_lines_and_points_are_those_of_the_report(tmp_path: Path) -> None:
    figure = fold([*RUN, OperationErrors(("a", "b"), 8, ERRORS, {})]).plot()
    losses, errors = figure.axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in losses.lines}
    expected = {"mask only": 3.0, "closed form: layer-wise": 2.0, "re-adjusted by SNOWS": 1.0}
    assert drawn == {name: [loss] * 3 for name, loss in expected.items()}
    assert [label.get_text() for label in losses.get_xticklabels()] == ["query", "key", "out"]
    assert {line.get_label(): tuple(line.get_ydata()) for line in errors.lines} == ERRORS
    figure.savefig(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 1000


def test_without_errors_of_operations_there_is_one_chart() -> None:
    assert len(fold(RUN).plot().axes) == 1


def test_without_matplotlib_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *others: Any, **named: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *others, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(snows.InputError, match=r"install it with: pip install 'snows\[plot\]'"):
        fold(RUN).plot()
