"""What a user who presses Ctrl-C is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

STATUS = 130  # what shells give for SIGINT


class Interrupted(Exception):  # noqa: N818  # not an error; and no KeyboardInterrupt, which typer would handle itself
    """The user stopped a command. The text says what is kept."""


@contextmanager
def saying(kept: Callable[[], str]) -> Iterator[None]:
    """Within, Ctrl-C raises `Interrupted` with the text that `kept` returns."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise Interrupted(kept()) from stop
