"""What belongs to the caller and is put back after a run: random state, gradient mode, warning filters."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .errors import SnowsWarning
from .events import Listener, Warned

_NOT_THE_CALLER = ("snows.", "contextlib.")  # modules


@contextmanager
def own_surroundings(device: torch.device | None, notify: Listener) -> Iterator[None]:
    """Within this context a run has a random state and a gradient mode of its own, and its warnings are events."""
    cuda = device is not None and device.type == "cuda" and torch.cuda.is_available()
    with (
        _warnings_as_events(notify),
        torch.random.fork_rng(devices=[device] if cuda else []),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield


@contextmanager
def _warnings_as_events(notify: Listener) -> Iterator[None]:
    """Each of our warnings is an event, and is shown at once: under the caller's filters, at the caller's line.

    The same message is shown once, and is an event with its number at the end. Warnings of others are shown as ever.
    """
    filters, show_as_before = list(warnings.filters), warnings.showwarning
    filename, line, registry = _caller()
    times: Counter[str] = Counter()

    def show(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
        if not issubclass(category, SnowsWarning):
            show_as_before(message, category, *where, **options)
            return
        times[str(message)] += 1
        if times[str(message)] == 1:
            notify(Warned(str(message)))
            with warnings.catch_warnings():
                warnings.filters[:] = filters  # type: ignore[index]  # a list, though typed as a sequence
                warnings.showwarning = show_as_before
                warnings.warn_explicit(str(message), category, filename, line, registry=registry)

    with warnings.catch_warnings():
        warnings.simplefilter("always", SnowsWarning)
        warnings.showwarning = show
        yield
    for message, count in times.items():
        if count > 1:
            notify(Warned(message, count))


def _caller() -> tuple[str, int, dict[Any, int]]:
    """File, line and warning registry of the first frame outside of this package."""
    frame = sys._getframe()
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(_NOT_THE_CALLER):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_globals.setdefault("__warningregistry__", {})
