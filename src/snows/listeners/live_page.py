"""The report while the run goes on, for a browser."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..events import Event, Retrained, RetrainingStarted, RunFinished, RunStarted
from .files import Writer

if TYPE_CHECKING:
    from ..results.report import Report

_REFRESH = 5.0  # seconds after which a browser reads the page again
_SHARE_OF_TIME = 0.02  # that writing may take, at most


class LivePage(Writer):
    """Writes the report anew after every layer, or every epoch of retraining. The page says that it is not finished,
    and a browser reads it again by itself. At the end it is the page of the finished run.

    Args:
        path: The file, such as "live.html".
        report: What the page shows before the run begins: for `snows.retrain` the report of the pruned network.

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

    def __init__(self, path: str | Path, report: Report | None = None) -> None:
        from ..results.report import fold  # comes with torch, which --help does without

        super().__init__(Path(path))
        self._report = fold((), report)
        self._not_before = 0.0
        self._replace(_REFRESH)

    def __call__(self, event: Event) -> None:
        from ..results.report import add

        if not add(event, self._report):
            return
        at_once = isinstance(event, RunStarted | RunFinished | RetrainingStarted | Retrained)
        if at_once or time.monotonic() >= self._not_before:
            self._write(_REFRESH)

    def close(self) -> None:
        """A run that was stopped will not change any more."""
        self._write(None)

    def _write(self, refresh: float | None) -> None:
        if self.failed:
            return
        began = time.monotonic()
        with self.writing():
            self._replace(refresh)
        self._not_before = began + (time.monotonic() - began) / _SHARE_OF_TIME

    def _replace(self, refresh: float | None) -> None:
        self._report.to_html(self.path, refresh)
