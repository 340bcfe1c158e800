"""The progress bar in a terminal, and the choice of the display that fits the place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TextIO, cast

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text

from .. import errors
from ..errors import ArgumentError, as_line
from ..events import Event, Listener
from .base import BEGINNING, Progress, memory_text
from .log import LogLines
from .notebook import NotebookBar, in_notebook
from .timeline import Timeline


class ProgressBar(Progress):
    """Two lines of a terminal: what is being done; how much is done, when it will end, and the memory in use.

    It disappears at the end, and shows only on a terminal. A run goes on if its terminal is closed.

    Args:
        description, total, completed: As for `Progress`.
        shown: Whether to show anything.
        console: Where. Default: standard error.

    Example:
        >>> with ProgressBar("training", total=2, shown=False) as bar:
        ...     for epoch in range(2):
        ...         bar.advance()
        >>> bar.timeline.completed
        2
    """

    def __init__(
        self,
        description: str = BEGINNING,
        total: int | None = None,
        completed: int = 0,
        shown: bool = True,
        console: Console | None = None,
    ) -> None:
        super().__init__(description, total, completed)
        self._console = console or Console(file=cast(TextIO, _Lasting(sys.stderr)))
        self._bar = _TwoLines(
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _EndColumn(self.timeline),
            console=self._console,
            transient=True,
            disable=not shown or not self._console.is_terminal,
        )
        self._shown = shown
        self._task = self._bar.add_task(as_line(description), total=total, completed=completed)
        self._bar.start()

    def print(self, line: str) -> None:
        if self._shown:
            self._console.print(as_line(line), markup=False, highlight=False)

    def _changed(self, event: Event | None) -> None:
        timeline = self.timeline
        description = as_line("  ".join(part for part in (timeline.description, timeline.detail) if part))
        self._bar.update(self._task, description=description, completed=timeline.completed, total=timeline.total)

    def close(self) -> None:
        self._bar.stop()


class _TwoLines(RichProgress):
    """The description above the bar: names of layers are long, and terminals have 80 columns."""

    def get_renderables(self) -> Iterator[RenderableType]:
        for task in self.tasks:
            yield Text(task.description, no_wrap=True, overflow="ellipsis")
            yield self.make_tasks_table([task])


class _EndColumn(ProgressColumn):
    """When the work will end, and the memory in use."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(Column(no_wrap=True))
        self._timeline = timeline

    def render(self, task: Task) -> Text:
        return Text("  ".join(part for part in (self._timeline.end(), memory_text()) if part))


class _Lasting:
    """A stream that may be closed at its other end. Then nothing more is written, and the work goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_progress(
    description: str = BEGINNING, total: int | None = None, completed: int = 0, shown: bool = True
) -> Progress:
    """The display that fits: a bar in a terminal or a notebook, else log lines; nothing if it is not `shown`."""
    if not shown:
        return Progress(description, total, completed)
    if in_notebook():
        return NotebookBar(description, total, completed)
    console = Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        return ProgressBar(description, total, completed)
    return LogLines(description, total, completed)


Listeners = bool | Listener | Sequence[bool | Listener]  # what progress= takes


@contextmanager
def listening(progress: Listeners, beginning: str = BEGINNING) -> Iterator[Listener]:
    """What `progress=` stands for: the display that fits, nothing, a listener, or several of these.

    `beginning` is shown until the first event. Listeners with a method `close` are closed at the end.
    """
    given = list(progress) if isinstance(progress, list | tuple) else [progress]
    with ExitStack() as stack:
        listeners: list[Callable[[Event], None]] = []
        for each in given:
            if not callable(each) and not isinstance(each, bool):
                raise ArgumentError(
                    f"progress is {errors.shown(progress)}; expected True, False, a callable that takes an event, or a "
                    "list of them"
                )
            listener = each if callable(each) else open_progress(beginning, shown=each)
            if hasattr(listener, "close"):
                stack.callback(listener.close)
            listeners.append(listener)

        def notify(event: Event) -> None:
            for listener in listeners:
                listener(event)

        yield notify
