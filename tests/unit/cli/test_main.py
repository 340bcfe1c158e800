"""Failures as one sentence and an exit status."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch

import snows
from snows.cli import main as entry
from snows.cli.interruption import Interrupted
from snows.cli.tables import make_console


def failing(error: BaseException, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit status of a command that raises this error."""

    def command(**_: object) -> None:
        raise error

    monkeypatch.setattr(entry, "app", command)
    monkeypatch.setattr(entry, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(sys, "argv", ["snows", "prune", *words])
    monkeypatch.setattr(warnings, "showwarning", None)  # restored afterwards
    with pytest.raises(SystemExit) as ended:
        entry.main()
    return int(ended.value.code or 0)


OUT_OF_MEMORY = "out of memory; use fewer --samples or a shorter --horizon"


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (snows.ArgumentError("pattern is 3;\nexpected another"), 2, "pattern is 3; expected another"),
        (snows.InputError("no layer"), 1, "no layer"),
        (OSError(28, "No space left", "out"), 1, "out: No space left"),
        (OSError("broken pipe"), 1, "broken pipe"),
        (MemoryError(), 1, OUT_OF_MEMORY),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            1,
            "out of memory; use fewer --samples or a shorter --horizon",
        ),
        (OSError(12, "Cannot allocate memory"), 1, OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA"), 1, OUT_OF_MEMORY),
    ],
)
def test_expected_failures(
    error: Exception,
    status: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert failing(error, monkeypatch) == status
    assert capsys.readouterr() == ("", f"error: {sentence}\n")


def test_debug_shows_where_it_failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(snows.InputError("no layer"), monkeypatch, "--debug") == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith("error: no layer\n")


def test_errors_of_our_own_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        failing(RuntimeError("a bug"), monkeypatch)


def test_a_warning_is_shown_once_and_others_not_at_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(**_: object) -> int:
        for _ in range(2):
            warnings.warn("look here", snows.SnowsWarning, stacklevel=1)
            warnings.warn("a library's own", UserWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(entry, "app", command)
    monkeypatch.setattr(warnings, "showwarning", None)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with pytest.raises(SystemExit):
            entry.main()
    assert capsys.readouterr().err == "warning: look here\n"


FORGED = "a\nout is as it was written\x1b[2J"


def test_a_line_break_in_a_name_is_no_line_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(**_: object) -> int:
        warnings.warn(f"the layer {FORGED}", snows.SnowsWarning, stacklevel=1)
        make_console().print(f"left dense: {FORGED}")
        raise Interrupted(f"nothing was saved in {FORGED}")

    monkeypatch.setattr(entry, "app", command)
    monkeypatch.setattr(warnings, "showwarning", None)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with pytest.raises(SystemExit):
            entry.main()
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        r"warning: the layer a out is as it was written\x1b[2J",
        r"interrupted; nothing was saved in a out is as it was written\x1b[2J",
    ]
    assert out.splitlines() == [r"left dense: a\nout is as it was written\x1b[2J"]
