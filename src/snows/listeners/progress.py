"""The progress bar of a run, on standard error."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..events import *


class ProgressBar:
    """One bar over all layers of all sweeps. Says nothing where standard error is no terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("reading, capturing, choosing masks", total=None)
        self._progress.start()

    def __call__(self, event: Event) -> None:
        if isinstance(event, LayerStarted):
            done, total = (
                event.sweep * event.total + event.index + isinstance(event, LayerSolved),
                event.total * event.sweeps,
            )
        elif isinstance(event, DistillStep):
            done, total = event.step, event.steps
        elif isinstance(event, MemoryEstimated):
            return self.say(str(event))
        else:
            return
        self._progress.update(self._task, completed=done, total=total, description=str(event))

    def say(self, words: str) -> None:
        """Above the bar, where it stays."""
        self._progress.console.print(words, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


from contextlib import contextmanager


@contextmanager
def listening(progress):
    bar = ProgressBar() if progress is True else None
    try:
        yield bar or (progress if callable(progress) else lambda event: None)
    finally:
        if bar:
            bar.close()
