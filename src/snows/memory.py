"""How much is held at once: sizes of pieces, what is kept between passes, and what goes to the host's memory."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

from .curvature import CurvatureKind
from .errors import ArgumentError
from .graph import Graph
from .graph.segment import Cost
from .plan import Plan
from .recipe import Recipe

_MICRO_BATCH = {"cpu": 250, "cuda": 1000}  # caches like small pieces, launches like large ones
_CPU_BYTES = 16 << 30  # the same on every machine, so that runs can be repeated bit for bit
_TARGETS, _PRODUCTS, _STREAMS, _FACTORS = 0.25, 0.3, 0.3, 0.1  # shares
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True)
class Memory:
    """Bytes that may be used, and by what."""

    total: int

    @property
    def targets(self) -> int:
        """Of one layer, kept between passes; beyond, they are computed for each pass."""
        return int(_TARGETS * self.total)

    @property
    def products(self) -> int:
        """Linearized segments of one layer."""
        return int(_PRODUCTS * self.total)

    @property
    def streams(self) -> int:
        """Activations of all samples, at one layer; beyond, they rest in the host's memory."""
        return int(_STREAMS * self.total)

    @property
    def factors(self) -> int:
        """Of one layer's closed form; beyond, they rest in the host's memory."""
        return int(_FACTORS * self.total)

    def offloads(self, graph: Graph, plan: Plan, samples: int, device: torch.device) -> bool:
        """Whether the two streams are too large for a device that is not the host itself."""
        if device.type == "cpu":
            return False
        largest = max((graph.live_bytes(planned.layer.position) for planned in plan.pruned), default=0)
        return 2 * largest * samples > self.streams


def memory_limits(device: torch.device, given: int | None = None) -> Memory:
    """What was given, or what is free."""
    if given is not None:
        return Memory(given)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return Memory(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return Memory(_CPU_BYTES)


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


def linearized_bytes(cost: Cost, kind: CurvatureKind, precision: torch.dtype) -> int:
    """What a linearized segment holds for one sample."""
    if kind == "gauss-newton":
        return cost.slope_bytes * precision.itemsize // torch.float32.itemsize
    return 2 * cost.bytes  # every value is needed twice, at most


def micro_batch_size(
    graph: Graph, plan: Plan, samples: int, recipe: Recipe, device: torch.device, memory: Memory
) -> int:
    """Samples in one piece, so that a pass over the largest segment fits."""
    costs = (graph.cost([planned.layer for planned in group], group[0].horizon) for group in plan.groups)
    largest = max((cost.bytes for cost in costs), default=1)
    fitting = memory.products // max(2 * largest, 1)
    wanted = recipe.minibatch or recipe.product_samples or samples
    return max(1, min(wanted, _MICRO_BATCH.get(device.type, 250), fitting, samples))
