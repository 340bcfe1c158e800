"""How fast this machine is, by a short measurement: every operation of the network, and what solves are made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..data.moments import samples_at_once, second_moment
from ..graph import Graph, Layer
from ..graph.derivatives import computation
from ..linalg.gram import inverted

_FIRST_SAMPLES, _MOST_SAMPLES = 2, 64
_SECONDS = 0.7  # that the timed passes may take
_PRODUCT_SIZE, _BLOCK_SIZE, _BLOCKS = 1024, 256, 16
_REPEATS = 3  # of which the quickest counts: others may use the machine as well


@dataclass(frozen=True)
class Speed:
    """Seconds for one sample, and operations per second.

    Attributes:
        nodes: Seconds of each node of the graph, by name.
        moments: Seconds of the second moments of each layer's inputs, by parameter.
        products: Operations per second of large matrix products.
        factors: Operations per second where blocks of a Gram matrix are inverted.
    """

    nodes: Mapping[str, float]
    moments: Mapping[str, float]
    products: float
    factors: float

    def of(self, nodes: Iterable[Node]) -> float:
        """Seconds of these nodes, for one sample."""
        return sum(self.nodes[node.name] for node in nodes)


def assumed_speed(graph: Graph, layers: Iterable[Layer], rate: float) -> Speed:
    """Nothing is measured: everything runs at this number of operations per second."""
    nodes = {node.name: node.meta["flops"] / rate for node in graph.nodes}
    moments = {layer.parameter: 2 * layer.positions * layer.columns**2 * layer.groups / rate for layer in layers}
    return Speed(nodes, moments, rate, rate)


def measured_speed(
    graph: Graph, layers: Iterable[Layer], samples: Callable[[int], list[Any]], most: int, device: torch.device
) -> Speed:
    """Run the network on a few samples, operation by operation. Takes a second or two.

    Args:
        graph: The network.
        layers: Those that will be pruned.
        samples: Gives the inputs of the graph for so many samples.
        most: How many samples there are.
        device: Where the run will work.
    """
    pruned = {layer.node: layer for layer in layers}
    few = min(_FIRST_SAMPLES, most)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        _timed_pass(graph, {}, samples(few), few, device)  # the first pass chooses kernels
        nodes, moments = _best_passes(graph, pruned, samples(few), few, device)
        per_sample = sum(nodes.values()) + sum(moments.values())
        count = min(most, _MOST_SAMPLES, int(_SECONDS / _REPEATS / max(per_sample, 1e-9)))
        if count > few:
            nodes, moments = _best_passes(graph, pruned, samples(count), count, device)
    return Speed(nodes, moments, _product_rate(device), _factor_rate(device))


def _best_passes(
    graph: Graph, pruned: Mapping[Node, Layer], inputs: list[Any], count: int, device: torch.device
) -> tuple[dict[str, float], dict[str, float]]:
    """The least time of each part in several passes, or in as many as there is time for."""
    began = time.perf_counter()
    nodes, moments = _timed_pass(graph, pruned, inputs, count, device)
    for _ in range(_REPEATS - 1):
        if time.perf_counter() - began > _SECONDS:
            break
        others = _timed_pass(graph, pruned, inputs, count, device)
        nodes, moments = _least(nodes, others[0]), _least(moments, others[1])
    return nodes, moments


def _least(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: min(seconds, other[name]) for name, seconds in one.items()}


def _timed_pass(
    graph: Graph, pruned: Mapping[Node, Layer], inputs: list[Any], count: int, device: torch.device
) -> tuple[dict[str, float], dict[str, float]]:
    values: dict[Node, Any] = dict(zip(graph.inputs, inputs, strict=True))
    fixed = graph.parameter_nodes
    nodes: dict[str, float] = {}
    moments: dict[str, float] = {}
    last_read = {argument: node for node in graph.nodes for argument in node.all_input_nodes}
    for node in graph.nodes:
        run = computation(node)
        values |= {a: graph.parameters[a.meta["parameter"]] for a in node.all_input_nodes if a in fixed}
        with _clock(device) as took:
            values[node] = run(values)
        nodes[node.name] = took() / count
        if node in pruned:
            layer = pruned[node]
            x = values[node.all_input_nodes[0]]
            with _clock(device) as took:
                _moments(layer, x, values[node])
            moments[layer.parameter] = took() / count
        for argument in node.all_input_nodes:
            if last_read[argument] is node:
                del values[argument]
    return nodes, moments


def _moments(layer: Layer, x: Tensor, y: Tensor) -> None:
    rows = samples_at_once(layer, x)
    for part, target in zip(x.split(rows), y.split(rows), strict=True):
        patches = layer.patches(part)
        second_moment(patches)
        patches.transpose(1, 2) @ layer.outputs(target)


def _product_rate(device: torch.device) -> float:
    size = _PRODUCT_SIZE
    x = torch.ones(size, size, device=device)
    return 2 * size**3 / _best(lambda: x @ x, device)


def _factor_rate(device: torch.device) -> float:
    """Of inverting blocks in double precision, counted as the cube of their size."""
    size = _BLOCK_SIZE
    blocks = (torch.eye(size, dtype=torch.float64, device=device) + 1e-3).repeat(_BLOCKS, 1, 1)
    return _BLOCKS * size**3 / _best(lambda: inverted(blocks), device)


def _best(work: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(_REPEATS):
        with _clock(device) as took:
            work()
        seconds.append(took())
    return min(seconds)


@contextmanager
def _clock(device: torch.device) -> Iterator[Callable[[], float]]:
    """Inside, work is timed; the yielded function says how long it took."""
    ended = began = time.perf_counter()

    def took() -> float:
        return max(ended - began, 1e-9)

    yield took
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    ended = time.perf_counter()
