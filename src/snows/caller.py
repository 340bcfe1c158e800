"""What belongs to the caller: random state, gradient mode, default and current device, warning filters, threads.

What a run changes of it is put back afterwards.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch

from .errors import SnowsWarning
from .events import Listener, Warned, ignore

_PROCESS = os.getpid()  # in a child of os.fork() still the parent's
_NOT_THE_CALLER = ("snows.", "contextlib.")  # modules


class Stoppable:
    """Within, Ctrl-C raises a `KeyboardInterrupt` that says what is kept.

    Where in our code it happened is of no use to the caller: these frames are cut off, and what they hold is freed.
    """

    def __init__(self, kept: Callable[[], str] = lambda: "nothing was saved") -> None:
        self._kept = kept

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, frames: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt) and frames is not None:
            frames.tb_next = None
            error.args, error.__suppress_context__ = (self._kept(),), True


@contextmanager
def cpu_by_default() -> Iterator[None]:
    """Tensors that are made without a device are made on the CPU, whatever the caller's default device."""
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        yield


@contextmanager
def own_surroundings(device: torch.device, notify: Listener = ignore) -> Iterator[None]:
    """Within this context a run has its own device, random state and gradient mode, and its warnings are events.

    Whatever traces, times or trains a model of the caller does so in here. Calls from several threads take turns.
    """
    with (
        ONE_AT_A_TIME,
        _warnings_as_events(notify),
        _threads_that_exist(),
        current_device(device),
        torch.random.fork_rng(devices=_seeded_gpus(device)),
        cpu_by_default(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield


def quiet_unless(shown: bool) -> AbstractContextManager[None]:
    """Inside, our warnings are not shown, unless they are to be: of several ranks one shows them."""
    return nullcontext() if shown else _without_our_warnings()


@contextmanager
def _without_our_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SnowsWarning)
        yield


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Within this context, streams, recordings and counters of torch are those of this GPU where none is named."""
    return torch.cuda.device(device) if _is_gpu(device) else nullcontext()


def _is_gpu(device: torch.device) -> bool:
    """Whether it is a GPU of this machine. Any other is refused when the model is moved to it."""
    return device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()


def _seeded_gpus(device: torch.device) -> list[int]:
    """Those that torch.manual_seed seeds: all. None where CUDA is not used: it is not started for a run on a CPU."""
    return list(range(torch.cuda.device_count())) if _is_gpu(device) or torch.cuda.is_initialized() else []


@contextmanager
def _threads_that_exist() -> Iterator[None]:
    """One, in a child of os.fork(): the threads of OpenMP stayed in its parent, and torch would wait for them."""
    threads = torch.get_num_threads()
    if os.getpid() == _PROCESS or threads == 1:
        yield
        return
    warnings.warn(
        f"this process was made by os.fork(), which copies no threads: one is used instead of {threads} (start it by "
        "'spawn' to use all)",
        SnowsWarning,
        stacklevel=3,
    )
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def free_in_children(lock: Any) -> None:
    """Let a child of os.fork() take a lock that another thread held: in the child, no thread would ever free it."""

    def free() -> None:
        if not getattr(lock, "_is_owned", bool)():  # a lock that the forking thread holds is held in the child, too
            lock._at_fork_reinit()  # as the standard library does with its own locks

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=free)


# Capture, attention kernels, warnings and random states belong to the process, not to a thread.
ONE_AT_A_TIME = threading.RLock()
free_in_children(ONE_AT_A_TIME)


@contextmanager
def _warnings_as_events(notify: Listener) -> Iterator[None]:
    """Each of our warnings is an event, and is shown at once: under the caller's filters, at the caller's line.

    The same message is shown once, and is an event with its number at the end. Warnings of others are shown as ever.
    """
    filters, show_as_before = list(warnings.filters), warnings.showwarning
    filename, line, registry = _caller()
    times: Counter[str] = Counter()
    process = os.getpid()

    def show(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
        if not issubclass(category, SnowsWarning) or os.getpid() != process:  # of a child of os.fork(), not of this run
            show_as_before(message, category, *where, **options)
            return
        times[str(message)] += 1
        if times[str(message)] == 1:
            notify(Warned(str(message)))
            with warnings.catch_warnings():
                warnings.filters[:] = filters  # type: ignore[index]  # a list, though typed as a sequence
                warnings.showwarning = show_as_before
                warnings.warn_explicit(str(message), category, filename, line, registry=registry)

    with warnings.catch_warnings():
        warnings.simplefilter("always", SnowsWarning)
        warnings.filterwarnings(
            "ignore", "Attempting to run cuBLAS"
        )  # torch's, of a thread that starts: it means nothing
        warnings.showwarning = show
        yield
    for message, count in times.items():
        if count > 1:
            notify(Warned(message, count))


def _caller() -> tuple[str, int, dict[Any, int]]:
    """File, line and warning registry of the first frame outside of this package."""
    frame = sys._getframe()
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(_NOT_THE_CALLER):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_globals.setdefault("__warningregistry__", {})
