"""How much memory a run may use, and how it is shared out: activations, targets, products, factors, passes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import ArgumentError, first_line, is_out_of_memory, shown

_CPU_BYTES = 16 << 30  # the same on every machine that has it, so that all of them end with the same bits
_HELD, _PRODUCTS, _PASS, _FACTORS = 0.5, 0.2, 0.3, 0.1  # shares of the total; a pass and products never run together
_WEIGHTS = 0.5  # the most of the total that weights take; if they need more, they rest outside of the device
_MOST_BYTES = 1 << 62  # more than any machine has
_HOST_SHARE = 0.5  # of the host's memory, for offloaded activations
FACTORING = 5  # inverting a chunk of row blocks takes this many copies of it
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True)
class Memory:
    """A budget in bytes: `total` on the device beside the weights, and `host` in host memory for activations that do
    not fit.

    Activations that do not fit the host either go to disk. `room` is for copies of weights that rest outside of the
    device; None: all weights are on the device.
    """

    total: int
    host: int = _MOST_BYTES
    room: int | None = None

    @property
    def held(self) -> int:
        """For what stays while a layer is solved: the activations of all samples, then its targets."""
        return int(_HELD * self.total)

    @property
    def products(self) -> int:
        """For the Jacobians of one layer's curvature products."""
        return int(_PRODUCTS * self.total)

    @property
    def factors(self) -> int:
        """For the factors of one layer's closed form. Larger ones are kept in host memory."""
        return int(_FACTORS * self.total)

    @property
    def chunk(self) -> int:
        """For row blocks that are inverted at once.

        Inverting takes several copies of them. They use the share of the products, which come later.
        """
        return int(_PRODUCTS * self.total) // FACTORING

    @property
    def choosing(self) -> int:
        """For mask methods while they choose: working memory for rows, or stored gradients."""
        return int(_PASS * self.total)

    @property
    def one_pass(self) -> int:
        """For one pass of one micro-batch through a segment."""
        return int(_PASS * self.total)

    def fitting_samples(self, wanted: int, sample_bytes: int, piece: int) -> int:
        """How many of the `wanted` samples a curvature product takes, so that their Jacobians fit.

        Jacobians that do not fit are computed again for every product, which takes longer than the product itself. Half
        of the samples serve as well. If not even these fit, all are taken. The number is rounded down to whole pieces.
        """
        fitting = self.products // max(sample_bytes, 1)
        if fitting >= wanted:
            return wanted
        if fitting > piece:
            fitting -= fitting % piece
        return fitting if fitting >= wanted / 2 else wanted

    def resident(self, live_bytes: int, samples: int) -> int:
        """How many samples keep their activations on the device, in both streams.

        `live_bytes` is what one sample holds in one stream.
        """
        return min(samples, self.held // max(2 * live_bytes, 1))

    def hosted(self, live_bytes: int) -> int:
        """How many of the other samples keep their activations in host memory; the rest go to disk."""
        return self.host // max(2 * live_bytes, 1)

    def targets(self, live_bytes: int, samples: int) -> int:
        """Bytes for one layer's targets. Targets that do not fit are computed again in every pass."""
        return max(0, self.held - 2 * live_bytes * self.resident(live_bytes, samples))


def least_of(limits: Sequence[Memory]) -> Memory:
    """What every one of several ranks has: they must decide alike."""
    rooms = [limit.room for limit in limits if limit.room is not None]
    return Memory(min(limit.total for limit in limits), min(limit.host for limit in limits), min(rooms, default=None))


@contextmanager
def one_out_of_memory() -> Iterator[None]:
    """However memory runs out, it is a torch.OutOfMemoryError: torch has that for GPUs, and a RuntimeError for CPUs."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if isinstance(error, torch.OutOfMemoryError) or not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(
            f"out of memory ({first_line(error)}); take fewer samples or a shorter horizon"
        ) from error


def memory_limits(device: torch.device, given: int | None = None, processes: int = 1, weights: int = 0) -> Memory:
    """The budget that the caller gave. By default what is free on a GPU, and min(16 GiB, host memory) on a CPU.

    So many `processes` share the host's memory. `weights` are the bytes that a run will hold of its network. They are
    part of a budget; but that of a CPU, if it is not given, is for all else.
    """
    installed = _host_bytes() // processes
    host = 0 if device.type == "cpu" else int(_HOST_SHARE * installed)  # a CPU's budget is host memory already
    budget = given or _free_bytes(device)
    if budget is None:
        budget = min(_CPU_BYTES, installed)
        return Memory(budget, host, int(_WEIGHTS * budget) if weights > _WEIGHTS * installed else None)
    most = int(_WEIGHTS * budget)
    return Memory(budget - weights, host) if weights <= most else Memory(budget - most, host, most)


def _free_bytes(device: torch.device) -> int | None:
    """What is free on a GPU; None for other devices, and if there is no such GPU, which is noticed later."""
    if device.type != "cuda":
        return None
    try:
        free, _ = torch.cuda.mem_get_info(device)
    except (RuntimeError, AssertionError):
        return None
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _host_bytes() -> int:
    """The host's memory, or the part of it that the container may use."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else _MOST_BYTES
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return installed if text == "max" else min(installed, int(text))


def as_bytes(given: int | str | None) -> int | None:
    """A number of bytes as people write it: 24GiB, 800 MB, 1e9, or a whole number."""
    if given is None:
        return None
    if isinstance(given, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmgt]i?)?b?\s*", given.lower())
        size = float(match[1]) * _UNITS[match[2] or ""] if match else 0.0
        value = int(size) if math.isfinite(size) else 0
    else:
        value = given if isinstance(given, int) and not isinstance(given, bool) else 0
    if value < 1:
        raise ArgumentError(f"memory is {shown(given)}; expected a size such as '24GiB', or a number of bytes")
    return min(value, _MOST_BYTES)
