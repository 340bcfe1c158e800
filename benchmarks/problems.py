"""The K-step problem of one layer, all else dense: what single layers are measured on."""

from __future__ import annotations

from torch import Tensor, nn

from snows.data.preparation import prepare
from snows.data.streams import Stream, cut
from snows.devices.distributed.ranks import ALONE, Ranks
from snows.patterns import PatternRules
from snows.plan import make_plan
from snows.solve.problem import LayerProblem


def layer_problem(
    model: nn.Module,
    x: Tensor,
    device: str,
    layer: str | None,
    pattern: str,
    horizon: int,
    piece: int | None = None,
    ranks: Ranks = ALONE,
) -> LayerProblem:
    """Of the layer with this name (None: the first that is pruned by default), in micro-batches of `piece` samples."""
    world = prepare(model, x, device, 0)
    plan = make_plan(world.graph, PatternRules.parse(pattern), horizon, layers=layer)
    first = plan.pruned[0]
    names = [node.name for node in world.graph.inputs]
    batches = cut(*world.samples.split(len(x)), names, piece or len(x), ranks)
    streams = [Stream(world.graph, world.graph.parameters, batches) for _ in range(2)]
    for stream in streams:
        stream.advance(first.layer.position)
    segment = world.graph.segment([first.layer], first.horizon)
    return LayerProblem(segment, streams[0], streams[1], "dense-stream", 1 << 40)
