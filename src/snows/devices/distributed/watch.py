"""Which ranks are alive. A rank that dies ends the run on all of them, with one sentence that names it.

A collective call does not say who is missing: gloo raises an error at once, NCCL waits. So every rank counts up a
number in the store through which torch.distributed starts, and looks at the numbers of the others.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, ClassVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from ...errors import InputError

_BEAT = 0.5  # seconds
_DEAD = 30.0  # seconds without a beat; a busy machine may stop a thread for long
_DEAD_IF_SUSPECTED = 3.0  # the same, once a call has failed or torchrun ends the ranks
_TO_LEAVE = 10.0  # seconds for the main thread to notice, before the process is ended
_DONE = "done"


class RankLostError(InputError):
    """Another process of the run is gone, or hangs. `speaks`: whether this rank is the one to say so."""

    speaks = True


class Watch:
    """A thread that beats, and listens to the beats of all other ranks."""

    _of_process: ClassVar[Watch | None] = None

    @classmethod
    def started(cls) -> Watch:
        """The watch of this process and its process group."""
        group = distributed_c10d._get_default_store()
        if cls._of_process is None or cls._of_process._group_store is not group:
            cls._of_process = cls(group)
        return cls._of_process

    @classmethod
    def finish(cls, well: bool = True) -> None:
        """This rank ends. If it does not end `well`, the others find it lost."""
        if cls._of_process is not None:
            cls._of_process._end(well)

    def __init__(self, store: Any) -> None:
        self._group_store = store
        # A client of its own: a call that waits in the store would hold up all others.
        self._store = PrefixStore("snows", store.clone())
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._patience = _DEAD
        self._stopped, self._found = threading.Event(), threading.Event()
        self._lost: int | None = None
        self._signals = _Signals()
        with suppress(ValueError):  # signals are the main thread's
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._on_termination)
                self._signals.hear()
        self._thread = threading.Thread(target=self._run, daemon=True, name="snows-watch")
        self._thread.start()
        # A thread that is in a call of the store when Python ends would abort the process.
        atexit.register(lambda: Watch.finish(well=not hasattr(sys, "last_value")))

    @contextmanager
    def naming_the_lost(self) -> Iterator[None]:
        """An error of a collective call becomes a sentence, if a rank is lost."""
        try:
            yield
        except RuntimeError as error:
            lost = self._lost_soon()
            if lost is None:
                raise
            raise lost from error

    def _on_termination(self, number: int, frame: FrameType | None) -> None:
        """torchrun sends SIGTERM to all ranks when one has died. The sentence comes first."""
        lost = self._lost_soon()
        if lost is not None:
            raise lost
        sys.exit(128 + number)

    def _lost_soon(self) -> RankLostError | None:
        """The error that names the lost rank; None if all are alive."""
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._patience = _DEAD_IF_SUSPECTED
        self._found.wait(_DEAD_IF_SUSPECTED + 4 * _BEAT)
        if self._lost is None:
            return None
        error = RankLostError(self._sentence())
        error.speaks = self._speaks
        return error

    @property
    def _speaks(self) -> bool:
        return self._rank == (1 if self._lost == 0 else 0)

    def _sentence(self) -> str:
        return (
            f"rank {self._lost} of {self._size} is gone or hangs, so all ranks stop; with resume=DIR (--resume DIR) "
            "the same call goes on behind the last finished layer, with any number of ranks"
        )

    def _run(self) -> None:
        beats = 0
        heard = {rank: ("", time.monotonic()) for rank in range(self._size) if rank != self._rank}
        while self._lost is None and not self._stopped.wait(_BEAT):
            beats += 1
            if signal.SIGTERM in self._signals.heard():
                self._patience = _DEAD_IF_SUSPECTED
            try:
                self._store.set(f"beat/{self._rank}", str(beats))
                self._listen(heard)
            except RuntimeError:  # the store is gone, and with it the process that held it
                if not self._stopped.is_set():
                    self._lose(0)

    def _listen(self, heard: dict[int, tuple[str, float]]) -> None:
        """Before its first beat a rank may still be busy elsewhere. After its last one it may be gone."""
        now = time.monotonic()
        for rank, (last, _) in heard.items():
            key = f"beat/{rank}"
            beat = self._store.get(key).decode() if self._store.check([key]) else ""
            if beat != last:
                heard[rank] = (beat, now)
        silent = {rank: since for rank, (beat, since) in heard.items() if beat not in ("", _DONE)}
        longest = min(silent, key=lambda rank: silent[rank], default=None)
        if longest is not None and now - silent[longest] > self._patience:
            self._lose(longest)

    def _lose(self, rank: int) -> None:
        self._lost = rank
        self._found.set()
        if self._stopped.wait(_TO_LEAVE):
            return
        if self._speaks:  # the main thread hangs in a call that does not end, such as one of NCCL
            print(f"error: {self._sentence()}", file=sys.stderr, flush=True)
        os._exit(1)

    def _end(self, well: bool) -> None:
        Watch._of_process = None
        self._stopped.set()
        with suppress(ValueError):
            if signal.getsignal(signal.SIGTERM) == self._on_termination:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._thread is not threading.current_thread():
            self._thread.join()
            self._signals.close()
        if well:
            with suppress(RuntimeError):
                self._store.set(f"beat/{self._rank}", _DONE)


class _Signals:
    """What signals came, for another thread: the main one may be in a call that does not end.

    torchrun kills ranks 30 seconds after their SIGTERM, which is before they find the lost one in their own time.
    """

    def __init__(self) -> None:
        self._ear, self._mouth = socket.socketpair()
        self._ear.setblocking(False)
        self._mouth.setblocking(False)

    def hear(self) -> None:
        """From now on. Only the main thread may call it."""
        before = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        if before != -1:  # it is an event loop's
            signal.set_wakeup_fd(before)

    def heard(self) -> bytes:
        """The numbers of those that have come since."""
        with suppress(BlockingIOError):
            return self._ear.recv(1024)
        return b""

    def close(self) -> None:
        with suppress(ValueError):
            hearing = signal.set_wakeup_fd(-1)
            if hearing != self._mouth.fileno():
                signal.set_wakeup_fd(hearing)
            self._ear.close()
            self._mouth.close()
