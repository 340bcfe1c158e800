"""What a user who presses Ctrl-C is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STATUS = 130  # what shells give for SIGINT


class Interrupted(Exception):  # noqa: N818  # not an error; and no KeyboardInterrupt, which typer would handle itself
    """The user stopped a command. The text says what is kept."""


@contextmanager
def keeping_layers(folder: Path | None) -> Iterator[None]:
    """Within, Ctrl-C raises `Interrupted`, which says what the folder of --resume holds."""
    try:
        yield
    except KeyboardInterrupt as stop:
        from ..results.journal import kept_solves

        raise Interrupted(kept_solves(folder, "--resume DIR", "command")) from stop


@contextmanager
def keeping_epochs(folder: Path | None) -> Iterator[None]:
    """Within, Ctrl-C raises `Interrupted`, which says how many epochs the folder of --resume holds."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise Interrupted(_kept_epochs(folder)) from stop


def _kept_epochs(folder: Path | None) -> str:
    if folder is None:
        return "nothing was saved; --resume DIR keeps finished epochs"
    from ..training.checkpoints import finished_epochs

    epochs = finished_epochs(folder)
    if not epochs:
        return f"no epoch was finished; {folder} holds nothing to continue from"
    return f"{epochs} {'epoch is' if epochs == 1 else 'epochs are'} kept in {folder}; the same command continues"


def kept_cells(finished: int, folder: Path | None) -> str:
    """What a stopped comparison holds."""
    if folder is None:
        return f"{finished} finished; pass --out DIR to continue from here the next time"
    return f"{finished} finished; the same command continues from here"
