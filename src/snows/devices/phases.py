"""Where a run's time and memory go: seconds and the peak of memory, phase by phase."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..events import Phase


class Phases:
    """A clock for named phases. A phase inside another stops the clock of the outer one.

    The peak of memory only ever rises. It belongs to the phase that raised it; a phase that never did has none.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")  # whose memory is meant, see `watch`
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, int] = {}
        self._open: list[str] = []
        self._since = time.perf_counter()
        self._peak = peak_memory(self.device)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def watch(self, device: torch.device) -> None:
        """From now on the peak is that of this device, which begins anew on a GPU."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.device, self._peak = device, peak_memory(device)

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device)

    @property
    def device_peak(self) -> int | None:
        """The peak of an accelerator; None on a CPU."""
        return peak_memory(self.device) if self.device.type == "cuda" else None

    @property
    def found(self) -> tuple[Phase, ...]:
        """The phases so far, in the order in which they first ended."""
        self._turn()
        return tuple(Phase(name, seconds, self._peaks.get(name)) for name, seconds in self._seconds.items())

    def _turn(self) -> None:
        """Give the time since the last turn, and a new peak, to the phase that is open."""
        now, peak = time.perf_counter(), peak_memory(self.device)
        if self._open:
            name = self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
            if peak is not None and peak > (self._peak or 0):
                self._peaks[name] = peak
        self._since, self._peak = now, peak


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that were in use so far: of a GPU, else of host memory. None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return None
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size
