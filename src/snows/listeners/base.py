"""What progress displays share: they follow events, or are told by hand what is being done."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from ..devices.usage import memory_in_use
from ..events import Event, MemoryEstimated, TimeEstimated
from .timeline import Timeline

BEGINNING = "reading samples, capturing the model, choosing masks"


class Progress:
    """Progress that is not shown. The displays are its subclasses.

    As a listener of a run it counts solved layers of all sweeps, then steps of the last stage. In a loop of your own
    say what is being done with `describe`, and count with `advance`; or call it with events that are `Counted`.

    Args:
        description: What is being done.
        total: How many steps it has. None: not known.
        completed: How many of them are done.
    """

    def __init__(self, description: str = BEGINNING, total: int | None = None, completed: int = 0) -> None:
        self.timeline = Timeline(description, total, completed)

    def __call__(self, event: Event) -> None:
        self.timeline(event)
        if isinstance(event, MemoryEstimated | TimeEstimated):
            self.print(str(event))
        self._changed(event)

    def describe(self, description: str) -> None:
        self.timeline.describe(description)
        self._changed(None)

    def advance(self) -> None:
        self.timeline.advance()
        self._changed(None)

    def print(self, line: str) -> None:
        """A line that stays."""

    def close(self) -> None:
        """The end: a bar disappears."""

    def _changed(self, event: Event | None) -> None:
        """The timeline changed, because of this event or by hand."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def memory_text() -> str:
    used = memory_in_use()
    return "" if used is None else f"{used / 2**30:.1f} GiB"
