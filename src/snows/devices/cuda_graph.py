"""Many small operations launched as one: on a GPU, a pass is recorded once and then replayed.

All of it happens on the current device, which is that of the run (`caller.current_device`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

T = TypeVar("T")

_CALLS_BEFORE = 2  # in which libraries choose their kernels; nothing may be recorded while they do


class Replayed(Generic[T]):
    """A function without arguments whose launches are recorded and replayed.

    Every call must use the same memory: inputs are tensors that are written in place between calls, and each call
    overwrites what the last one returned. The first calls are not recorded. A function that reads a value back from the
    device cannot be recorded; it is called every time.
    """

    def __init__(self, function: Callable[[], T], device: torch.device) -> None:
        self._function = function
        self._replays = device.type == "cuda"
        self._calls = 0
        self._recording: torch.cuda.CUDAGraph | None = None
        self._returned: T | None = None

    def __call__(self) -> T:
        if self._recording is None and self._replays and self._calls >= _CALLS_BEFORE:
            self._record()
        if self._recording is None:
            self._calls += 1
            return on_side_stream(self._function) if self._replays else self._function()
        self._recording.replay()
        return self._returned  # type: ignore[return-value]  # set when it was recorded

    def _record(self) -> None:
        try:
            self._recording, self._returned = recorded(self._function)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # some operation reads a value back from the device
            self._replays = False


class ReplayedOn(Generic[T]):
    """The same for a function of inputs: tensors, and anything else, in nested lists, tuples and dicts.

    The first inputs are copied, and those of later calls into the same memory. For inputs of another form (other shapes
    or types, or other values that are no tensors) the function is called as it is.
    """

    def __init__(self, function: Callable[[Any], T], device: torch.device) -> None:
        self._function, self._device = function, device
        self._replayed: Replayed[T] | None = None
        self._leaves: list[Any] = []
        self._spec: pytree.TreeSpec | None = None

    def __call__(self, inputs: Any) -> T:
        leaves, spec = pytree.tree_flatten(inputs)
        if self._replayed is None:
            self._leaves, self._spec = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
            self._replayed = _on(self._function, pytree.tree_unflatten(self._leaves, spec), self._device)
        if spec != self._spec or not _alike(leaves, self._leaves):
            return self._function(inputs)
        for own, new in zip(self._leaves, leaves, strict=True):
            if isinstance(own, Tensor):
                own.copy_(new)
        return self._replayed()


def _on(function: Callable[[Any], T], inputs: Any, device: torch.device) -> Replayed[T]:
    """It holds nothing else: a cycle of references would keep memory until the garbage collector comes round."""
    return Replayed(lambda: function(inputs), device)


def _alike(leaves: list[Any], others: list[Any]) -> bool:
    return all(
        a.shape == b.shape and a.dtype == b.dtype
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else a is b or a == b
        for a, b in zip(leaves, others, strict=True)
    )


def on_side_stream(function: Callable[[], T]) -> T:
    """On a CUDA stream of its own, as recordings are. Autograd reads what it saves on the stream it saved it on."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        returned = function()
    torch.cuda.current_stream().wait_stream(stream)
    return returned


def recorded(function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """The launches of one call, and what it returned: replays write there."""
    recording = torch.cuda.CUDAGraph()
    # A stream of our own: torch keeps one for the whole process, of the device that was current at first. The outer
    # block is for recordings that fail: torch leaves their stream current.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(recording, stream=torch.cuda.Stream()):
        returned = function()
    return recording, returned
