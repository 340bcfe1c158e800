"""Progress as lines of a log, where there is no terminal: in a log file, a batch job, a pipe."""

from __future__ import annotations

import logging
import math
import sys
import threading

from ..errors import as_line
from ..events import (
    Counted,
    EpochEnded,
    Event,
    LayerSolved,
    Retrained,
    RetrainingStarted,
    RunFinished,
    RunStarted,
    Working,
)
from ..words import counted, duration
from .base import BEGINNING, Progress, memory_text

logger = logging.getLogger("snows")

_LEAST_SECONDS = 1.0  # between two lines, so that a network of tiny layers does not flood the log
_LEAST_SECONDS_OF_STEPS = 20.0  # the same between steps that are counted, of which there are many


class LogLines(Progress):
    """A line for solved layers, epochs or steps of other work: one a second at most, and at least one a minute.

    Steps that come as `Counted` events have a line in 20 seconds at most.

    Lines go to the logger `snows` at level INFO. If the program has configured logging, its handlers and levels decide
    where they appear. If it has not, they go to standard error as long as this listener is open.

    Args:
        description, total, completed: As for `Progress`.
        seconds: The longest time without a line.

    Example:
        >>> import logging, sys
        >>> logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s", force=True)
        >>> with LogLines("training", total=2) as log:
        ...     log.advance()
        training
    """

    def __init__(
        self, description: str = BEGINNING, total: int | None = None, completed: int = 0, seconds: float = 60.0
    ) -> None:
        super().__init__(description, total, completed)
        self._level = logger.level
        self._handler = _to_standard_error()
        self._seconds = seconds
        self._last_line = self._last_count = -1.0
        self._closed = threading.Event()
        self._write(description)
        threading.Thread(target=self._every_minute, name="snows log", daemon=True).start()

    def describe(self, description: str) -> None:
        if description != self.timeline.description:
            self.timeline.describe(description)
            self._write_unless_too_soon()

    def print(self, line: str) -> None:
        self._write(line)

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        if self._handler is not None:
            logger.removeHandler(self._handler)
            logger.setLevel(self._level)

    def _changed(self, event: Event | None) -> None:
        if isinstance(event, RunStarted):
            layers, samples = counted(len(event.layers), "layer"), counted(event.samples, "sample")
            self._write(f"{event}: {layers}, {samples}, on {event.device}")
        elif isinstance(event, RetrainingStarted):
            self._write(str(event))
        elif isinstance(event, RunFinished | Retrained):
            self._write(f"finished in {duration(event.seconds)}")
        elif event is None or isinstance(event, LayerSolved | EpochEnded | Working | Counted):
            self._write_unless_too_soon(event)

    def _write_unless_too_soon(self, event: Event | None = None) -> None:
        least = _LEAST_SECONDS_OF_STEPS if isinstance(event, Counted) else _LEAST_SECONDS
        if self.timeline.elapsed - self._last_line >= least:
            self._write(self._line(_outcome(event)))

    def _line(self, outcome: str = "") -> str:
        timeline = self.timeline
        count = "" if timeline.total is None else f"{timeline.completed}/{timeline.total}"
        spent = timeline.in_this_stage
        since = f"{duration(spent)} in this step" if spent > _LEAST_SECONDS else ""
        parts = [timeline.description, timeline.detail, outcome, count, since, timeline.end(), memory_text()]
        return ", ".join(part for part in parts if part)

    def _write(self, line: str) -> None:
        self._last_line = self.timeline.elapsed
        logger.info(as_line(line))

    def _every_minute(self) -> None:
        while not self._closed.wait(max(0.01, self._seconds - (self.timeline.elapsed - self._last_line))):
            if self.timeline.elapsed - self._last_line >= self._seconds:
                self._write(self._line())


def _outcome(event: Event | None) -> str:
    if not isinstance(event, LayerSolved):
        return ""
    if not math.isfinite(event.solve.loss):
        return "masked"
    return f"loss {event.solve.loss_masked:.3g} -> {event.solve.loss:.3g}"


def _to_standard_error() -> logging.Handler | None:
    """A handler of our own, if the program has configured none."""
    if logger.hasHandlers():
        return None
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return handler
