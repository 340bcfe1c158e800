"""How much is held at once: sizes of pieces, what is kept between passes, and what rests elsewhere."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import ArgumentError

_CPU_BYTES = 16 << 30  # the same on every machine that has it, so that runs can be repeated bit for bit
_HELD, _PRODUCTS, _PASS, _FACTORS = 0.5, 0.2, 0.3, 0.1  # shares; a pass, and products with their tangents, take turns
_HOST_SHARE = 0.5  # of the host's memory, for what rests there
FACTORING = 5  # copies of a chunk of row blocks while it is inverted
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True)
class Memory:
    """Bytes of the device that may be used, and by what. `host`: those for what rests in the host's memory; beyond lies
    the disk."""

    total: int
    host: int = 1 << 62

    @property
    def held(self) -> int:
        """While a layer is solved: activations of all samples, then its targets as far as there is room."""
        return int(_HELD * self.total)

    @property
    def products(self) -> int:
        """Linearized segments of one layer."""
        return int(_PRODUCTS * self.total)

    @property
    def factors(self) -> int:
        """Of one layer's closed form; beyond, they rest in the host's memory."""
        return int(_FACTORS * self.total)

    @property
    def chunk(self) -> int:
        """Of row blocks that are inverted at once: that takes some copies of them, and as much as products, which wait.
        (A piece of the activations is there all the time.)"""
        return int(_PRODUCTS * self.total) // FACTORING

    @property
    def choosing(self) -> int:
        """While masks are chosen, for rows or gradients: as much as a pass. Between sweeps, too, much else is held."""
        return int(_PASS * self.total)

    @property
    def one_pass(self) -> int:
        """What a pass over one piece may take."""
        return int(_PASS * self.total)

    def fitting_samples(self, wanted: int, held_bytes: int, piece: int) -> int:
        """Of `wanted`, as many as have room for their Jacobians, in whole pieces: to linearize again for each product
        takes longer than the product. A half does as well; where there is room for less, all are taken."""
        fitting = self.products // max(held_bytes, 1)
        if fitting >= wanted:
            return wanted
        if fitting > piece:
            fitting -= fitting % piece
        return fitting if fitting >= wanted / 2 else wanted

    def resident(self, live_bytes: int, samples: int) -> int:
        """Samples whose activations stay on the device, in both streams; those of the others rest.

        `live_bytes`: of one sample in one stream, at the layer.
        """
        return min(samples, self.held // max(2 * live_bytes, 1))

    def hosted(self, live_bytes: int) -> int:
        """Of those that rest, how many do so in the host's memory."""
        return self.host // max(2 * live_bytes, 1)

    def targets(self, live_bytes: int, samples: int) -> int:
        """Of one layer, kept between passes; beyond, they are computed for each pass."""
        return max(0, self.held - 2 * live_bytes * self.resident(live_bytes, samples))


def memory_limits(device: torch.device, given: int | None = None) -> Memory:
    """The given budget. Without one: what is free on a GPU; on a CPU 16 GiB, or the host's memory if that is less."""
    host = 0 if device.type == "cpu" else int(_HOST_SHARE * _host_bytes())
    if given is not None:
        return Memory(given, host)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return Memory(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), host)
    return Memory(min(_CPU_BYTES, _host_bytes()), host)


def _host_bytes() -> int:
    """What the host has, or what its container may use."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 62
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return installed if text == "max" else min(installed, int(text))


def as_bytes(given: int | str | None) -> int | None:
    """A number of bytes from what people write: 24GiB, 800 MB, 1e9."""
    if given is None:
        return None
    if isinstance(given, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmgt]i?)?b?\s*", given.lower())
        size = float(found[1]) * _UNITS[found[2] or ""] if found else 0.0
        value = int(size) if math.isfinite(size) else 0
    else:
        value = given if isinstance(given, int) and not isinstance(given, bool) else 0
    if value < 1:
        raise ArgumentError(f"memory is {given!r}; expected a size such as '24GiB', or a number of bytes")
    return value
