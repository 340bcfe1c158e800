"""The listeners that flags name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..events import Listener
from ..listeners import EventsFile, LivePage, TensorBoard
from ..results.files import make_folders, next_to

if TYPE_CHECKING:
    from ..results.report import Report


def listeners_of(
    events: Path | None,
    tensorboard: Path | None,
    live: bool,
    out: Path | None,
    quiet: bool,
    report: Report | None = None,
) -> list[Listener]:
    """Opened before the work begins, so that a wrong path costs no time. Says where the live page is.

    The page goes on from the report, if there is one.
    """
    listeners: list[Listener] = []
    if events is not None:
        listeners.append(EventsFile(events))
    if tensorboard is not None:
        listeners.append(TensorBoard(tensorboard))
    if live:
        page = Path("snows-live.html") if out is None else next_to(out, "-live.html")
        make_folders(page.parent)
        listeners.append(LivePage(page, report))
        if not quiet:
            print(f"open in a browser to follow the run: {page.resolve().as_uri()}", file=sys.stderr)
    return listeners
