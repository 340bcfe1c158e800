"""The command line as one of several ranks that torchrun started: one of them speaks for all."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from ..devices.distributed.launch import is_first
from ..errors import ArgumentError

_SHARED = {"prune", "compare", "sensitivity"}  # commands whose work is shared


@contextmanager
def one_of_several() -> Iterator[None]:
    """Inside, only the first rank prints results. The others leave if the command does not share its work."""
    if is_first():
        yield
        return
    if not _SHARED & set(sys.argv[1:2]):
        sys.exit(0)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def said_by_another(error: Exception) -> bool:
    """Whether another rank shows this error: the first one has the same arguments, and one names a lost rank."""
    return not getattr(error, "speaks", is_first() or not isinstance(error, ArgumentError))
