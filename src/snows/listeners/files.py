"""What listeners that write to disk share: an error at the start is the caller's, a later one must not end the run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import InputError, SnowsWarning


@contextmanager
def opening(path: Path) -> Iterator[None]:
    """An error within is an `InputError` that names the path."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write to {path}: {error.strerror or error}") from error


class Writer:
    """Writes that may fail: after the first failure there is a warning, and nothing more is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed = False

    @contextmanager
    def writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # a full disk, a folder that was removed, a file that was closed
            if not self.failed:
                self.failed = True
                warnings.warn(f"nothing more is written to {self.path}: {error}", SnowsWarning, stacklevel=2)
