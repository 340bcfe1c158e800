"""K-step problems of the tiny networks, in the middle of a run: every layer is already pruned."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from snows.data.streams import Batches, Stream
from snows.graph import Layer
from snows.solve.problem import LayerProblem
from tests.networks import call_arguments, captured, example

SAMPLES = 5


def layer_of(name: str, parameter: str) -> Layer:
    return next(layer for layer in captured(name)[1].layers if layer.parameter == parameter)


@cache
def pruned_parameters(name: str) -> dict[str, Tensor]:
    """The parameters of a network in which every layer is already pruned and re-adjusted, as in a second sweep."""
    _, graph = captured(name)
    generator = torch.Generator().manual_seed(3)
    changed = dict(graph.parameters)
    for layer in [layer for layer in graph.layers if layer.refusal is None]:
        weight = changed[layer.parameter]
        noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        kept = torch.rand(weight.shape, generator=generator) < 0.7
        changed[layer.parameter] = (weight + 0.1 * noise) * kept
    return changed


def problem(
    name: str,
    parameter: str,
    horizon: int,
    split: tuple[int, ...] = (2, 3),
    targets_from: str = "dense-stream",
    keep_bytes: int = 1 << 30,
    held_out: int = 0,
) -> LayerProblem:
    """Of one layer. Samples come in micro-batches of these sizes, the last `held_out` of which are held out."""
    graph, layer = captured(name)[1], layer_of(name, parameter)
    leaves = torch.utils._pytree.tree_leaves(call_arguments(example(name, sum(split))))
    names = [node.name for node in graph.inputs]
    pieces = [dict(zip(names, part, strict=True)) for part in zip(*(leaf.split(split) for leaf in leaves), strict=True)]
    dense = Stream(graph, graph.parameters, Batches(pieces, split, held_out))
    pruned = Stream(graph, pruned_parameters(name), Batches(pieces, split, held_out))
    dense.advance(layer.position)
    pruned.advance(layer.position)
    return LayerProblem(graph.segment([layer], horizon), dense, pruned, targets_from, keep_bytes)


def weight_of(name: str, parameter: str) -> Tensor:
    """Where derivatives are taken. An output whose weights are all zero would lie on the kink of its rectifier."""
    return pruned_parameters(name)[parameter] + 0.02
