"""A group of processes that torch.distributed connects."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ArgumentError, is_out_of_memory, shown
from .ranks import ALONE, Ranks
from .watch import Watch

T = TypeVar("T")

_apart: ContextVar[bool] = ContextVar("_apart", default=False)
_TIMEOUT = timedelta(hours=2)  # one rank may evaluate, read or write for long while others wait; the watch is quicker


class SharedOutOfMemoryError(torch.OutOfMemoryError):
    """Memory ran out on one rank, and all of them know it. Raised on all of them, so that all may try again."""


class Group(Ranks):
    """The ranks of the default process group. `watch` knows which of them are alive."""

    out_of_memory = SharedOutOfMemoryError

    def __init__(self, watch: Watch) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())
        self._watch = watch

    def sums(self, work: Callable[[], Sequence[Tensor]], zeros: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
        terms, error = _attempt(work)
        own = zeros() if terms is None else terms
        summed: list[Tensor | None] = [None] * len(own)
        for dtype in dict.fromkeys(term.dtype for term in own):  # most often there is one
            members = [index for index, term in enumerate(own) if term.dtype == dtype]
            # All numbers in one sum, and with them whether a rank has none.
            failed = own[members[0]].new_full((1,), float(error is not None))
            together = torch.cat([*(own[index].flatten() for index in members), failed])
            self._reduce(together)
            if together[-1] > 0:
                raise _out_of_memory(error)
            parts = together[:-1].split([own[index].numel() for index in members])
            for index, part in zip(members, parts, strict=True):
                summed[index] = part.view(own[index].shape)
        return [tensor for tensor in summed if tensor is not None]

    def together(self, work: Callable[[], T]) -> T:
        result, error = _attempt(work)
        if isinstance(error, SharedOutOfMemoryError):  # out of a call inside of `work`: all know it
            raise error
        failed = torch.tensor(float(error is not None))
        self._reduce(failed)
        if failed > 0:
            raise _out_of_memory(error)
        return result  # type: ignore[return-value]  # None only where `work` gives it

    def rows(self, work: Callable[[slice], Sequence[Tensor]], count: int) -> list[Tensor]:
        own = self.part(count)
        made = self.together(lambda: [tensor.cpu() for tensor in work(own)] if own.start < own.stop else [])
        parts = [part for part in self.gathered(made) if part]
        return [torch.cat(column) for column in zip(*parts, strict=True)]

    def gathered(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        with self._watch.naming_the_lost():
            dist.all_gather_object(found, value)
        return found

    def from_first(self, work: Callable[[], T]) -> T:
        found: list[Any] = [None, None]  # the result, and the error instead of it
        if self.is_first:
            try:
                found[0] = work()
            except Exception as error:  # whatever it is, the others must not wait
                found[1] = error
        with self._watch.naming_the_lost():
            dist.broadcast_object_list(found, src=0)
        if found[1] is not None:
            raise found[1]
        result: T = found[0]
        return result

    def take_first(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._send(tensor, partial(dist.broadcast, src=0))

    @cached_property
    def on_this_host(self) -> int:
        names = self.gathered(socket.gethostname())
        return names.count(names[self.rank])

    def _reduce(self, tensor: Tensor) -> None:
        self._send(tensor, dist.all_reduce)

    def _send(self, tensor: Tensor, call: Callable[[Tensor], Any]) -> None:
        """Change a tensor by a collective call, which wants numbers in one block of memory, on a device it serves."""
        dtype = torch.uint8 if tensor.dtype == torch.bool else tensor.dtype
        sent = tensor.to(carrier(tensor.device, dist.get_backend_config()), dtype).contiguous()
        with self._watch.naming_the_lost():
            call(sent)
        if sent is not tensor:
            tensor.copy_(sent)


def carrier(device: torch.device, backends: str) -> torch.device:
    """From where a tensor of this device is sent: NCCL serves GPUs alone.

    Args:
        device: The tensor's.
        backends: As torch has them: "cuda:nccl", or "cpu:gloo,cuda:nccl".
    """
    served = [backend.split(":")[0] for backend in backends.split(",")]
    return device if device.type in served else torch.device(served[0])


def _attempt(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """The result, or the error if memory ran out."""
    try:
        return work(), None
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        return None, error.with_traceback(None)  # the traceback would hold what filled the memory


def _out_of_memory(own: BaseException | None) -> SharedOutOfMemoryError:
    return SharedOutOfMemoryError("out of memory on another rank" if own is None else str(own))


def current_ranks() -> Ranks:
    """The ranks of the process group that the caller initialized, or this process alone."""
    together = _is_connected() and dist.get_world_size() > 1 and not _apart.get()
    return Group(Watch.started()) if together else ALONE


@contextmanager
def apart() -> Iterator[None]:
    """Inside, this process works alone, although there is a process group."""
    token = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(token)


def writes_files() -> bool:
    """Whether this process is not one of several, or the first of them."""
    return not _is_connected() or dist.get_rank() == 0


def _is_connected() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextmanager
def connected(device: str | None, local_rank: int, local_size: int) -> Iterator[None]:
    """Inside, there is a process group: gloo on CPUs, NCCL on GPUs, one GPU for each of the ranks of this host."""
    on_gpu = (device or ("cuda" if torch.cuda.is_available() else "cpu")).startswith("cuda")
    gpu = own_gpu(device or "cuda", local_rank, local_size) if on_gpu else None
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=_TIMEOUT, device_id=gpu)
    watch = Watch.started()
    try:
        yield
        with watch.naming_the_lost():
            dist.barrier()  # the store may be in rank 0, which must not be the first to leave
    except BaseException:
        Watch.finish(well=False)
        raise
    Watch.finish()


def own_gpu(device: str, local_rank: int, local_size: int) -> torch.device:
    """This rank's, from now on the current one."""
    if device != "cuda":
        raise ArgumentError(f"device {shown(device)} is one GPU, and there are several ranks; expected 'cuda' or 'cpu'")
    if local_size > (found := torch.cuda.device_count()):
        raise ArgumentError(
            f"there are {local_size} ranks on this host, and {found} GPUs; expected a GPU for each, or --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
