"""Every event of a run as a line of JSON, for programs that follow it."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from datetime import UTC, datetime
from pathlib import Path

from ..events import Event
from .files import Writer, opening

_AT_ONCE = getattr(os, "O_NONBLOCK", 0)  # not on all systems


class EventsFile(Writer):
    """Writes a line of JSON for every event, at once: `event` is its class in `snows.events`, `time` when it happened,
    the rest its fields. Numbers that are not finite are null. An existing file is replaced.

    Args:
        path: The file.

    Raises:
        InputError: The file cannot be written.

    Example:
        >>> import json, pathlib, tempfile, torch
        >>> import snows
        >>> from snows.listeners import EventsFile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "events.jsonl")
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> result = snows.prune(model, torch.randn(64, 8), "2:4", layers="0", progress=EventsFile(path))
        >>> [json.loads(line)["event"] for line in path.read_text().splitlines()][:2]
        ['RunStarted', 'LayerStarted']
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(Path(path))
        with opening(self.path):
            self._file = os.fdopen(_open_at_once(self.path), "w", encoding="utf-8")

    def __call__(self, event: Event) -> None:
        if self.failed:
            return
        line = json.dumps(as_data(event))
        with self.writing():
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        with self.writing():
            self._file.close()


def _open_at_once(path: Path) -> int:
    """A new file, or a FIFO if somebody reads it: opened in the usual way, it waits until somebody does."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _AT_ONCE, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(error.errno, "it is a FIFO that nobody reads, or a socket") from error
        raise
    if _AT_ONCE:
        os.set_blocking(handle, True)  # a slow reader loses no events
    return handle


def as_data(event: Event) -> dict[str, object]:
    """The event as plain data for JSON."""
    from ..results.report import finite  # comes with torch, which --help does without

    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return {"event": type(event).__name__, "time": now, **finite(dataclasses.asdict(event))}
