"""What the package asks of the processes that prune together: here the answers of a process alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Ranks:
    """One process alone. `Group` is several of them. With another `size` it is good for planning only.

    All ranks call the same methods in the same order. A call ends when all ranks have made it.

    Attributes:
        rank: The number of this process, from 0.
        size: The number of processes.
    """

    out_of_memory: type[Exception] = torch.OutOfMemoryError  # after which all ranks may try again

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def on_this_host(self) -> int:
        """How many of the ranks share the memory of this rank's host."""
        return 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def owner(self, index: int) -> int:
        """The rank that works on a sample, or on a micro-batch. They are dealt out in turn."""
        return index % self.size

    def owns(self, index: int) -> bool:
        return self.owner(index) == self.rank

    def share(self, count: int) -> int:
        """The most of `count` things that one process gets."""
        return math.ceil(count / self.size)

    def part(self, count: int) -> slice:
        """Which of `count` neighbours this process gets. They may be none."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def dealt(self, costs: Sequence[float]) -> list[int]:
        """The rank that does each of several independent jobs: the costliest first, each for whom has least to do."""
        owners, busy = [0] * len(costs), [0.0] * self.size
        for job in sorted(range(len(costs)), key=lambda job: -costs[job]):
            owners[job] = min(range(self.size), key=busy.__getitem__)
            busy[owners[job]] += costs[job]
        return owners

    def sums(self, work: Callable[[], Sequence[Tensor]], zeros: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
        """The sums over all ranks of what `work` gives on each.

        If one rank runs out of memory in it, all of them raise `out_of_memory`.

        Args:
            work: Gives this rank's terms.
            zeros: Gives terms of the same shapes, dtypes and devices, which add nothing.
        """
        return list(work())

    def together(self, work: Callable[[], T]) -> T:
        """What `work` gives on this rank. If one rank runs out of memory in it, all raise `out_of_memory`."""
        return work()

    def rows(self, work: Callable[[slice], Sequence[Tensor]], count: int) -> list[Tensor]:
        """The tensors that `work` gives for `count` rows, which ranks share as equal neighbours.

        Only this of all calls may be made inside of `together`: both begin with the same question.

        Args:
            work: Gives tensors with one row for each of those that it is asked for. They are independent of each other.
            count: Of all rows.
        """
        return list(work(slice(0, count)))

    def gathered(self, value: T) -> list[T]:
        """The values of all ranks, in their order."""
        return [value]

    def from_first(self, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, where alone it is done. An error that it raises there is raised everywhere."""
        return work()

    def take_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors with those of rank 0."""


ALONE = Ranks()
_sharing: ContextVar[Ranks] = ContextVar("_sharing", default=ALONE)


@contextmanager
def sharing(ranks: Ranks) -> Iterator[None]:
    """Inside, work on rows is shared by `ranks`, who all do the same."""
    token = _sharing.set(ranks)
    try:
        yield
    finally:
        _sharing.reset(token)


def sharers() -> Ranks:
    """Who share work on rows here."""
    return _sharing.get()
