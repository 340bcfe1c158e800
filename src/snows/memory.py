"""How much is held at once: sizes of pieces, and what is kept between passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .curvature import CurvatureKind
from .graph import Graph
from .plan import Plan
from .recipe import Recipe

_MICRO_BATCH = {"cpu": 250, "cuda": 1000}  # caches like small pieces, launches like large ones
# Bytes held by a linearized segment, as a multiple of its values: at most 1 where only rectifiers keep theirs, about 2
# where every value is needed twice (second derivatives of attention and layer norms).
_LINEARIZED_FACTOR = {"gauss-newton": 1, "hessian": 2, "fisher": 2}
_CPU_BYTES = 4 << 30
_SHARE_OF_FREE = 0.3


@dataclass(frozen=True)
class Memory:
    """Bytes that may be kept between passes: the targets of one layer, and its linearized products."""

    targets: int
    products: int


def memory_limits(device: torch.device) -> Memory:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return Memory(targets=int(_SHARE_OF_FREE * free), products=int(_SHARE_OF_FREE * free))
    return Memory(targets=_CPU_BYTES, products=_CPU_BYTES)


def linearized_bytes(segment_bytes: int, kind: CurvatureKind = "hessian") -> int:
    """What a linearized segment holds for one sample, from the bytes of its values."""
    return _LINEARIZED_FACTOR[kind] * segment_bytes


def micro_batch_size(graph: Graph, plan: Plan, samples: int, recipe: Recipe, device: torch.device) -> int:
    """Samples in one piece, so that the largest linearized segment fits."""
    costs = (graph.cost([planned.layer for planned in group], group[0].horizon) for group in plan.groups)
    largest = max((cost.bytes for cost in costs), default=1)
    fitting = memory_limits(device).products // max(linearized_bytes(largest), 1)
    wanted = recipe.minibatch or recipe.product_samples or samples
    return max(1, min(wanted, _MICRO_BATCH.get(device.type, 250), fitting, samples))
