"""Many small operations, launched as one: on a GPU a pass is recorded and then replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

_CALLS_BEFORE = 2  # libraries choose their kernels before anything is recorded


class Replayed(Generic[T]):
    """A function without arguments that works on the same memory in every call: it reads tensors that are written in
    place between calls, and what it returns is overwritten by the next.

    The first calls run as they are. Where a function asks the device for a value it cannot be recorded, and all do.
    """

    def __init__(self, function: Callable[[], T], device: torch.device) -> None:
        self._function = function
        self._replays = device.type == "cuda"
        self._called = 0
        self._recording: torch.cuda.CUDAGraph | None = None
        self._returned: T | None = None

    def __call__(self) -> T:
        if self._recording is None and self._replays and self._called >= _CALLS_BEFORE:
            self._record()
        if self._recording is None:
            self._called += 1
            return self._aside() if self._replays else self._function()
        self._recording.replay()
        return self._returned  # type: ignore[return-value]  # what was recorded

    def _aside(self) -> T:
        """On a stream of its own, as recordings are: what autograd saves must be made on the stream it is read on."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            returned = self._function()
        torch.cuda.current_stream().wait_stream(stream)
        return returned

    def _record(self) -> None:
        recording = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(recording):
                self._returned = self._function()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # an operation that asks the device for a value
            self._replays = False
        else:
            self._recording = recording
