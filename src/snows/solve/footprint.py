"""How many samples make a piece, and what is kept between passes."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..devices.distributed.ranks import ALONE, Ranks
from ..devices.memory import Memory
from ..devices.weights import rest
from ..graph import Graph
from ..graph.cost import Cost
from ..graph.segment import SampleLayout
from ..plan import Plan, PlannedLayer
from .objective import CurvatureKind
from .settings import ALL_SAMPLES, Settings

GRADIENT = 1.5  # a gradient takes this multiple of a pass's values: the values, their errors and slopes
_MICRO_BATCH = {"cpu": 250, "cuda": 1000}  # small pieces fit CPU caches, large ones keep a GPU busy
_MOST_FLOPS = 6e10  # of one operation on one piece, on a CPU: one to three seconds on two cores


def linearized_bytes(cost: Cost, kind: CurvatureKind, precision: torch.dtype) -> int:
    """Bytes that a linearized segment holds for one sample."""
    if kind == "gauss-newton":
        return cost.slope_bytes * precision.itemsize // torch.float32.itemsize
    return 2 * cost.bytes  # every value is saved at most twice


def operations_kept(graph: Graph, plan: Plan, samples: int, settings: Settings, memory: Memory) -> list[Node]:
    """The operations whose outputs in the dense network are computed once, for all layers and sweeps.

    These are all operations that are a target of some layer, or none if they do not fit in memory for all samples.
    """
    if settings.targets != "dense-stream" or rest(graph.parameters):  # computing them reads all weights at once
        return []
    segments = [graph.segment([planned.layer for planned in group], group[0].horizon) for group in plan.groups]
    layouts = {layout for segment in segments for layout in segment.sample_layouts}
    if layouts != {SampleLayout(axis=0, inner=False)}:
        return []
    names = {name for segment in segments for name in segment.outputs}
    nodes = [node for node in graph.operations if node.name in names]
    live = max(graph.live_bytes(segment.position) for segment in segments)
    held = sum(node.meta["bytes"] for node in nodes) + max(segment.cost.prelude_bytes for segment in segments)
    return nodes if held * samples <= memory.targets(live, samples) else []


def micro_batch_size(
    graph: Graph,
    plan: Plan,
    samples: int,
    settings: Settings,
    device: torch.device,
    memory: Memory,
    ranks: Ranks = ALONE,
) -> int:
    """Samples in one piece, such that a pass through the largest segment fits in memory. Ranks share every piece.

    It is as large as that of a process alone that has the memory of all ranks: both then choose the same samples.
    """

    def needed(group: tuple[PlannedLayer, ...]) -> int:
        cost = graph.cost([planned.layer for planned in group], group[0].horizon)
        live = graph.live_bytes(min(planned.layer.position for planned in group))
        return int(GRADIENT * cost.bytes) + cost.output_bytes + cost.prelude_bytes + 2 * live

    fitting = ranks.size * memory.one_pass // max([1, *(needed(group) for group in plan.groups)])
    together = settings.minibatch if settings.in_minibatches else settings.curvature.samples
    return max(1, min(together, samples, _MICRO_BATCH.get(device.type, 250), fitting, ending_soon(graph, device)))


def ending_soon(graph: Graph, device: torch.device) -> int:
    """Samples for which every single operation ends within seconds, as Ctrl-C is not noticed inside of one."""
    if device.type != "cpu":
        return ALL_SAMPLES
    largest = max([1, *(int(node.meta["flops"]) for node in graph.nodes)])
    return max(1, int(_MOST_FLOPS // largest))
