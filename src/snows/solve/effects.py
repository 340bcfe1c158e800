"""What pruning did to the network: the error of every operation, and the weights of every layer before and after.

Only the report shows it, so it may cost little: a few dozen samples go through each network once, far less than the
solve of one layer takes.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from ..data.samples import Samples
from ..devices.memory import Memory
from ..devices.weights import rest, where_they_rest
from ..events import Event, OperationErrors, WeightFacts, WeightsShown
from ..graph import Graph
from ..graph.cost import bytes_of
from ..graph.layers import module_of
from ..graph.segment import Program
from .objective import square_sum

_LEAST_SAMPLES, _MOST_SAMPLES = 8, 64
_SHARE = 16  # a network is measured on one of so many calibration samples
_COPIES = 3  # of every value: the dense network's, the other network's, and their difference
_LEAST_VARIANCE = 1e-12

_BINS = 31  # odd: zero is in the middle of one
_SPREAD = 4.0  # standard deviations that a histogram shows; what is outside counts in the outermost bins
_MOST_WEIGHTS = 1 << 20  # of larger layers a histogram takes evenly spaced weights
_ROWS, _COLUMNS = 32, 64  # of the picture of a mask


def effects(
    graph: Graph,
    masks: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    stages: Mapping[str, Mapping[str, Tensor]],
    samples: Samples,
    calibration: int,
    memory: Memory,
) -> Iterator[Event]:
    """The events that show what pruning did.

    Args:
        graph: With the dense weights.
        masks: Of all pruned layers.
        weights: The final ones.
        stages: Parameters that differ from the dense network's, by the name of a stage of the run. Empty ones did not
            happen.
        samples: To measure on.
        calibration: How many samples the run has in all.
        memory: That may be used.
    """
    dense, weights = where_they_rest(graph.parameters), where_they_rest(weights)
    yield WeightsShown({name: weight_facts(dense[name], weights[name], mask) for name, mask in masks.items()})
    if rest(graph.parameters):  # each network would read all of them, once for every few samples
        return
    networks = {name: changed for name, changed in stages.items() if changed}
    # Without re-adjusting, the run ends with the mask only, whose method may have changed weights that it keeps.
    masked = {name: dense[name] * mask if networks else weights[name] for name, mask in masks.items()}
    found = operation_errors(graph, samples, {"mask only": masked, **networks}, memory, calibration)
    if found is not None:
        yield found


def operation_errors(
    graph: Graph, samples: Samples, networks: Mapping[str, Mapping[str, Tensor]], memory: Memory, calibration: int
) -> OperationErrors | None:
    """The error of every operation in each of the networks, which are the parameters of the graph that differ.

    An error is the mean squared difference from the dense network, over the variance there. Of `calibration` samples in
    the run only a few are taken. None if not even one of them fits in memory.
    """
    nodes = [node for node in dict.fromkeys([*graph.operations, *graph.outputs]) if _is_measured(node)]
    piece = _fitting(graph, memory)
    count = min(samples.count, _enough(calibration))
    if not nodes or not piece:
        return None
    program = graph.giving(nodes, first_order=True)
    measured = {name: _Measured(program) for name in networks}
    for start in range(0, count, piece):
        rows = samples.rows(start, min(start + piece, count))
        values = dict(zip((node.name for node in graph.inputs), rows, strict=True))
        with torch.no_grad():
            dense = program(values, graph.parameters)
            for name, changed in networks.items():
                measured[name].add(program(values, {**graph.parameters, **changed}), dense)
    output = graph.outputs[0] if len(graph.outputs) == 1 else None
    return OperationErrors(
        names=_names(graph, nodes),
        samples=count,
        errors={name: each.errors() for name, each in measured.items()},
        agreement={name: each.agreeing(output) / count for name, each in measured.items() if _has_classes(output)},
    )


def samples_at_once(graph: Graph, calibration: int, memory: Memory) -> int:
    """How many samples go through the network at once, at most."""
    return min(_enough(calibration), _fitting(graph, memory))


def _enough(calibration: int) -> int:
    return max(_LEAST_SAMPLES, min(_MOST_SAMPLES, calibration // _SHARE))


def _fitting(graph: Graph, memory: Memory) -> int:
    """Samples whose values fit in memory, which may be none."""
    return memory.one_pass // max(1, _COPIES * sum(bytes_of(node) for node in graph.nodes))


def _is_measured(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point() and bytes_of(node) > 0


def _has_classes(output: Node | None) -> bool:
    """Whether the network's only output looks like one score for each class."""
    return (
        output is not None and _is_measured(output) and output.meta["val"].ndim == 2 and output.meta["val"].shape[1] > 1
    )


class _Measured:
    """Sums over samples for one network and the dense one."""

    def __init__(self, program: Program) -> None:
        self._names = program.gives
        self._squares = dict.fromkeys(program.gives, 0.0)  # of errors
        self._moments = {name: np.zeros(3) for name in program.gives}  # of dense values: count, sum, sum of squares
        self._agreeing: Counter[str] = Counter()

    def add(self, outputs: Mapping[str, Tensor], dense: Mapping[str, Tensor]) -> None:
        for name in self._names:
            target = dense[name]
            self._squares[name] += float(square_sum(outputs[name] - target))
            total = float(target.sum(dtype=torch.float64))
            self._moments[name] += (target.numel(), total, float(square_sum(target)))
            if target.ndim == 2:
                self._agreeing[name] += int((outputs[name].argmax(1) == target.argmax(1)).sum())

    def errors(self) -> tuple[float, ...]:
        found = []
        for name in self._names:
            count, total, squares = self._moments[name]
            variance = max(squares / count - (total / count) ** 2, _LEAST_VARIANCE)
            found.append(_short(self._squares[name] / count / variance))
        return tuple(found)

    def agreeing(self, output: Node | None) -> int:
        return self._agreeing[output.name] if output is not None else 0


def _names(graph: Graph, nodes: list[Node]) -> tuple[str, ...]:
    """A readable name for each operation: its module, and its operator where a module has several operations."""
    modules = [module_of(node) for node in nodes]
    times = Counter(modules)
    operators = [str(node.target).split(".")[-2] if "." in str(node.target) else node.name for node in nodes]
    return tuple(
        module
        if module and (times[module] == 1 or operator in module.split(".")[-1])
        else f"{module} {operator}".strip()
        for module, operator in zip(modules, operators, strict=True)
    )


def weight_facts(before: Tensor, after: Tensor, mask: Tensor) -> WeightFacts:
    """Histograms of a layer's weights in the dense network and of those that are kept, and a picture of its mask."""
    every = max(1, before.numel() // _MOST_WEIGHTS)
    old, new, kept = (tensor.flatten()[::every] for tensor in (before, after, mask))
    old, new = old.float(), new[kept].float()
    limit = max(min(float(old.abs().max()), _SPREAD * float(old.std())), 1e-12)

    def shares(weights: Tensor) -> tuple[float, ...]:
        counts = np.histogram(weights.clamp(-limit, limit).cpu().numpy(), _BINS, (-limit, limit))[0]
        return tuple(_short(count / len(old)) for count in counts)

    return WeightFacts(-_short(limit), _short(limit), shares(old), shares(new), *_picture(mask))


def _picture(mask: Tensor) -> tuple[int, int, str]:
    """The corner of a mask as rows, columns and packed bits. Inputs of one position are side by side, as in N:M."""
    matrix = mask.movedim(1, -1).flatten(1) if mask.ndim > 2 else mask.flatten(1)
    corner = matrix[:_ROWS, :_COLUMNS].cpu().numpy()
    return *corner.shape, base64.b64encode(np.packbits(corner).tobytes()).decode()


def _short(value: float) -> float:
    """Four digits are enough for a picture."""
    return float(f"{value:.4g}")
