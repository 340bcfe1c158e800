"""The entry point of the command line: it runs a command and turns failures into exit statuses."""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from typing import Any, NoReturn

import typer

from ..devices.allocation import keep_freed_memory
from ..devices.distributed.launch import is_first, name_of_rank
from ..errors import ArgumentError, SnowsError, SnowsWarning, is_out_of_memory, one_line, printable
from .commands import app
from .interruption import STATUS, Interrupted
from .ranks import one_of_several, said_by_another

_UsageError: Any = typer.BadParameter.__base__  # of the click inside typer, or of the installed one


def main() -> None:
    """Run the command line. Every expected failure is one sentence on standard error."""
    _show_each_warning_once()
    logging.getLogger("snows").setLevel(logging.INFO)  # lines of progress, where there is no terminal
    keep_freed_memory()
    try:
        with one_of_several():
            status = app(standalone_mode=False)
    except Interrupted as stop:
        _interrupt(f"interrupted; {stop}")
    except Exception as error:
        sentence, status = _failure(error)
        if sentence is None:
            raise
        if said_by_another(error):
            sys.exit(status)
        _fail(sentence, status)
    if status == STATUS:  # typer caught Ctrl-C
        _interrupt("interrupted")
    sys.exit(status)


def _show_each_warning_once() -> None:
    """On one line each. One command may prune several times, and other libraries' warnings are not for users."""
    shown: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, SnowsWarning) and str(message) not in shown and is_first():
            shown.add(str(message))
            print(f"warning: {one_line(str(message))}", file=sys.stderr)

    warnings.showwarning = show


def _failure(error: Exception) -> tuple[str | None, int]:
    """What to say, and the exit status. None: nobody expected this error."""
    if isinstance(error, SnowsError):
        return str(error), 2 if isinstance(error, ArgumentError) else 1
    if isinstance(error, _UsageError):
        return f"{error.format_message()} (see `snows --help`)", 2
    if is_out_of_memory(error):
        return "out of memory; use fewer --samples or a shorter --horizon", 1
    if isinstance(error, OSError):  # a name that is too long, a folder that may not be read, a full disk …
        return f"{error.filename}: {error.strerror}" if error.filename else str(error), 1
    return None, 1


def _fail(sentence: str, status: int) -> NoReturn:
    if "--debug" in sys.argv:  # not from the parsed flags: parsing them may be what failed
        print(printable(traceback.format_exc()), file=sys.stderr)
    print(f"{name_of_rank()}error: {one_line(sentence)}", file=sys.stderr)
    sys.exit(status)


def _interrupt(sentence: str) -> NoReturn:
    print(one_line(sentence), file=sys.stderr)
    sys.exit(STATUS)


if __name__ == "__main__":
    main()
