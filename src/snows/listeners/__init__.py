"""Listeners of a run: displays of its progress. They may be combined with one another and with your own.

    snows.prune(model, calibration, "2:4", progress=[True, my_listener])

A listener is a callable that takes an event (`snows.events`). If it has a method `close`, this is called at the end.
"""

from __future__ import annotations

from .base import Progress
from .events_file import EventsFile
from .live_page import LivePage
from .log import LogLines
from .notebook import NotebookBar
from .progress import ProgressBar, open_progress
from .tensorboard import TensorBoard

__all__ = [
    "EventsFile",
    "LivePage",
    "LogLines",
    "NotebookBar",
    "Progress",
    "ProgressBar",
    "TensorBoard",
    "open_progress",
]
