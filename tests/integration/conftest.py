"""The command line in this process, for all tests that call it, and what it answers."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from snows.cli.commands import main


class Outcome(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def shown(self) -> str:
        """Standard output of a command that went well."""
        assert self.status == 0, self.err
        return self.out

    @property
    def data(self) -> Any:
        """Of --json: the whole of standard output is strict JSON."""

        def refuse(constant: str) -> NoReturn:
            raise AssertionError(f"{constant} is no JSON")

        return json.loads(self.shown, parse_constant=refuse)


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
