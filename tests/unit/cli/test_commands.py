"""Adding a command, and what every command has in common."""

from __future__ import annotations

import sys
from typing import Annotated

import pytest
import typer

from snows.cli import arguments
from snows.cli.arguments import JsonOption
from snows.cli.commands import app
from snows.cli.main import main
from snows.errors import ArgumentError
from snows.masks import NAMES


def call(*words: str) -> int:
    """The exit status of `snows ...` in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["snows", *words])
        patch.setattr("warnings.showwarning", None)  # restored afterwards
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)


def test_a_command_is_a_function_with_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To add a command: its options from `arguments`, its errors the package's own."""
    monkeypatch.setattr(app, "registered_commands", list(app.registered_commands))

    @app.command()
    def double(number: Annotated[int, typer.Argument(help="A number.")], as_json: JsonOption = False) -> None:
        """Twice a number."""
        if number < 0:
            raise ArgumentError(f"number is {number}; expected one that is not negative")
        print(f"[{2 * number}]" if as_json else 2 * number)

    assert call("double", "21") == 0
    assert call("double", "21", "--json") == 0
    assert capsys.readouterr() == ("42\n[42]\n", "")
    assert call("double", "--", "-1") == 2
    assert capsys.readouterr() == ("", "error: number is -1; expected one that is not negative\n")
    assert call("double", "many") == 2
    assert "Invalid value for " in capsys.readouterr().err
    assert call("--help") == 0
    assert "Twice a number." in capsys.readouterr().out


def test_every_option_is_defined_once() -> None:
    """One name for each flag; --pattern, --mask and --out mean something else where networks are compared."""
    flags = {
        name: word
        for name, option in vars(arguments).items()
        for info in getattr(option, "__metadata__", ())
        for word in (info.default, *(info.param_decls or ()))  # typer keeps the first word in `default`
        if str(word).startswith("--")
    }
    assert len(flags) > 25
    several = sorted(flag for flag in set(flags.values()) if list(flags.values()).count(flag) > 1)
    assert several == ["--mask", "--out", "--pattern"]


def test_the_masks_that_help_names_are_those_that_exist() -> None:
    assert arguments.MASKS.split(", ") == list(NAMES)
    assert set(arguments.COMPARED_MASKS.split(",")) < set(NAMES)
