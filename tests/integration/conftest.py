"""The command line, called in this process, and its answers."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from snows.cli.main import main


def strict_json(text: str) -> Any:
    """NaN and infinity, which Python would read, are no JSON."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


class Outcome(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def shown(self) -> str:
        """Standard output of a command that succeeded."""
        assert self.status == 0, self.err
        return self.out

    @property
    def data(self) -> Any:
        """What --json printed; nothing else may be on standard output."""
        return strict_json(self.shown)


Snows = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Snows:
    """`snows ...` in this process."""

    def call(*words: str | Path, columns: int = 200) -> Outcome:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["snows", *map(str, words)])
        capsys.readouterr()
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            with pytest.raises(SystemExit) as ended:
                main()
        captured = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), captured.out, captured.err)

    return call


def assert_error(outcome: Outcome, status: int, words: str) -> None:
    lines = outcome.err.splitlines()
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("error: "), outcome.err
    assert words in lines[0]
    assert outcome.out == ""
    assert outcome.status == status
