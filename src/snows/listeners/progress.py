"""The progress bar of every command and run, on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..events import DistillStep, Event, LayerSolved, LayerStarted, Listener, MemoryEstimated, TrainingStep


class ProgressBar:
    """One bar, and what is being done now. It disappears at the end, and shows only on a terminal.

    As a listener of a run it counts solved layers of all sweeps, then steps of the last stage. Other work sets its
    description and its count by hand.
    """

    def __init__(
        self,
        description: str = "reading samples, capturing the model, choosing masks",
        total: int | None = None,
        completed: int = 0,
        shown: bool = True,
        console: Console | None = None,
    ) -> None:
        self._console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not shown or not (self._console.is_terminal or self._console.is_jupyter),
        )
        self._shown = shown
        self._task = self._progress.add_task(description, total=total, completed=completed)
        self._progress.start()

    def __call__(self, event: Event) -> None:
        if isinstance(event, MemoryEstimated):
            self.print(str(event))
        elif isinstance(event, LayerStarted):
            solved = event.sweep * event.total + event.index + isinstance(event, LayerSolved)
            self._show(str(event), solved, event.sweeps * event.total)
        elif isinstance(event, DistillStep | TrainingStep):
            self._show(str(event), event.step, event.steps)

    def describe(self, description: str) -> None:
        self._progress.update(self._task, description=description)

    def advance(self) -> None:
        self._progress.advance(self._task)

    def print(self, line: str) -> None:
        """A line above the bar, which stays."""
        if self._shown:
            self._console.print(line, markup=False, highlight=False)

    def _show(self, description: str, completed: int, total: int) -> None:
        self._progress.update(self._task, description=description, completed=completed, total=total)

    def close(self) -> None:
        self._progress.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def listening(progress: bool | Listener) -> Iterator[Listener]:
    """What `progress=` of `snows.prune` stands for: a progress bar, the listener itself, or one that ignores all."""
    if callable(progress):
        yield progress
    elif progress:
        with ProgressBar() as bar:
            yield bar
    else:
        yield lambda event: None
