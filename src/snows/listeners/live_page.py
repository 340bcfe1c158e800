"""The report while the run goes on, for a browser."""

from __future__ import annotations

import time
from pathlib import Path

from ..events import CGStep, DistillStep, Event, RunFinished, RunStarted
from .files import Writer

_REFRESH = 5.0  # seconds after which a browser reads the page again
_SHARE_OF_TIME = 0.02  # that writing may take, at most


class LivePage(Writer):
    """Writes the report anew after every layer. The page says that it is not finished, and a browser reads it again by
    itself. At the end it is the page of the finished run.

    Args:
        path: The file, such as "live.html".

    Raises:
        InputError: The file cannot be written.

    Example:
        >>> import pathlib, tempfile, torch
        >>> import snows
        >>> from snows.listeners import LivePage
        >>> path = pathlib.Path(tempfile.mkdtemp(), "live.html")
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> result = snows.prune(model, torch.randn(64, 8), "2:4", layers="0", progress=[False, LivePage(path)])
        >>> "Sequential pruned to 2:4" in path.read_text()
        True
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(Path(path))
        self._events: list[Event] = []
        self._not_before = 0.0
        self._replace(_REFRESH)

    def __call__(self, event: Event) -> None:
        if isinstance(event, CGStep | DistillStep):
            return
        self._events.append(event)
        if isinstance(event, RunStarted | RunFinished) or time.monotonic() >= self._not_before:
            self._write(_REFRESH)

    def close(self) -> None:
        """A run that was stopped will not change any more."""
        if self._events and not isinstance(self._events[-1], RunFinished):
            self._write(None)

    def _write(self, refresh: float | None) -> None:
        if self.failed:
            return
        began = time.monotonic()
        with self.writing():
            self._replace(refresh)
        self._not_before = began + (time.monotonic() - began) / _SHARE_OF_TIME

    def _replace(self, refresh: float | None) -> None:
        from ..results.report import fold  # comes with torch, which --help does without

        fold(self._events).to_html(self.path, refresh)
