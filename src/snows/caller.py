"""What belongs to the caller and is put back after a run: random state, gradient mode, warnings."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .errors import SnowsWarning
from .events import Listener, Warned

_OWN_FRAMES = ("snows.", "contextlib")


@contextmanager
def own_surroundings(device: torch.device | None, notify: Listener) -> Iterator[None]:
    """Random state, gradient mode and inference mode of our own; warnings reach the user at once and are events."""
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
    """Each of our warnings becomes an event and is shown once, under the caller's filters, at the caller's line."""
    filters, show_others = list(warnings.filters), warnings.showwarning
    filename, line, registry = _caller()
    shown: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
        if not issubclass(category, SnowsWarning):
            show_others(message, category, *where, **options)
        elif str(message) not in shown:
            shown.add(str(message))
            notify(Warned(str(message)))
            with warnings.catch_warnings():
                warnings.filters[:] = filters  # type: ignore[index]  # a list, whatever the stubs say
                warnings.showwarning = show_others
                warnings.warn_explicit(str(message), category, filename, line, registry=registry)

    with warnings.catch_warnings():
        warnings.simplefilter("always", SnowsWarning)
        warnings.showwarning = show
        yield


def _caller() -> tuple[str, int, dict[Any, int]]:
    """File, line and warning registry of the first frame outside of this package."""
    frame = sys._getframe()
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(_OWN_FRAMES):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_globals.setdefault("__warningregistry__", {})
