"""One layer changed at a time, all others dense: what that does to the network's outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..data.moments import gram_of_inputs
from ..data.samples import Samples
from ..data.streams import Stream, cut
from ..devices.memory import Memory
from ..graph import Graph, Layer
from ..graph.cost import bytes_of

_MICRO_BATCH = {"cpu": 100, "cuda": 250}
_JUDGED = 250  # samples: enough to see how much a layer matters
_FEWEST = 8
_OUTPUT_BYTES = 1 << 30  # of the dense network, which are kept


@dataclass(frozen=True)
class Effect:
    """What a change of one layer does to the network's outputs.

    Attributes:
        error: The mean squared change of the outputs, relative to their variance.
        kl: The mean KL divergence of the predictions from the dense ones; None if the outputs are no class scores.
        agreement: The share of samples with the same first class as in the dense network; None as for `kl`.
        accuracy: The share of samples whose label comes first; None without labels.
    """

    error: float
    kl: float | None = None
    agreement: float | None = None
    accuracy: float | None = None


class Trials:
    """The layers in order of execution, each with the activations before it: they are computed once.

    `fitted` samples give the statistics of each layer's inputs, `judged` ones the effects.
    """

    def __init__(
        self, graph: Graph, layers: Sequence[Layer], fitted: Samples, judged: Samples, memory: Memory | None = None
    ) -> None:
        self.graph, self.labels = graph, judged.labels
        self.layers = sorted(layers, key=lambda layer: layer.position)
        names = [node.name for node in graph.inputs]
        size = _MICRO_BATCH.get(next(iter(graph.parameters.values())).device.type, 100)
        self.stream = Stream(graph, graph.parameters, cut(fitted, judged, names, size), memory)

    @property
    def at_once(self) -> int:
        """How many samples go through the network at once, at most."""
        return max(self.stream.sizes)

    def __iter__(self) -> Iterator[Trial]:
        _ = self.dense  # while the stream holds the network's inputs
        for layer in self.layers:
            self.stream.advance(layer.position)
            yield Trial(self, layer)

    def outputs(
        self, position: int, layer: Layer | None = None, weight: Tensor | None = None
    ) -> Iterator[list[Tensor]]:
        """The floating-point outputs of the network for each micro-batch of judged samples."""
        program = self.graph.program(position, self.graph.end)
        parameters = self.graph.parameters
        if layer is not None and weight is not None:
            parameters = {**parameters, layer.parameter: weight}
        for index in self.stream.held_out:
            values = self.stream[index]
            with torch.no_grad():
                values = {**values, **program(values, parameters)}
            found = [values[node.name] for node in self.graph.outputs]
            yield [value for value in found if isinstance(value, Tensor) and value.is_floating_point()]

    @cached_property
    def dense(self) -> list[list[Tensor]]:
        return list(self.outputs(self.stream.position))

    @property
    def dense_accuracy(self) -> float | None:
        """Of the network as it is; None without labels or class scores."""
        if self.labels is None or self.scores is None:
            return None
        first = torch.cat([outputs[self.scores] for outputs in self.dense]).argmax(1)
        return _share_equal(first, self.labels)

    @cached_property
    def variances(self) -> list[float]:
        """Of each output of the dense network."""
        columns = zip(*self.dense, strict=True)
        return [_variance(torch.cat([value.flatten() for value in column])) for column in columns]

    @cached_property
    def scores(self) -> int | None:
        """Which of the outputs are class scores, samples x classes; None if there are none."""
        shapes = [value.shape for value in self.dense[0]]
        return next((i for i, shape in enumerate(shapes) if len(shape) == 2 and shape[1] > 1), None)


@dataclass(frozen=True)
class Trial:
    """One layer, whose weight may be exchanged for another."""

    _trials: Trials
    layer: Layer

    @property
    def name(self) -> str:
        """Of the layer's weight."""
        return self.layer.parameter

    @property
    def weight(self) -> Tensor:
        """The layer's own."""
        return self._trials.graph.parameters[self.name]

    @cached_property
    def gram(self) -> Tensor:
        """The second moment of the layer's inputs in the dense network."""
        return gram_of_inputs(self.layer, self._trials.stream)

    def error(self, weight: Tensor) -> float:
        """How far the outputs move with this weight, relative to their variance."""
        return self.effect(weight).error

    def effect(self, weight: Tensor) -> Effect:
        trials = self._trials
        squares, sizes = [0.0] * len(trials.variances), [0] * len(trials.variances)
        predictions = []
        changed = trials.outputs(self.layer.position, self.layer, weight)
        for outputs, dense in zip(changed, trials.dense, strict=True):
            for i, (a, b) in enumerate(zip(outputs, dense, strict=True)):
                squares[i] += float((a - b).square().sum())
                sizes[i] += a.numel()
            if trials.scores is not None:
                predictions.append((outputs[trials.scores], dense[trials.scores]))
        shares = [s / max(n, 1) / v for s, n, v in zip(squares, sizes, trials.variances, strict=True)]
        error = sum(shares) / len(shares)
        if trials.scores is None:
            return Effect(error)
        ours, theirs = (torch.cat(column) for column in zip(*predictions, strict=True))
        return Effect(error, *_of_classes(ours, theirs, trials.labels))


def _variance(values: Tensor) -> float:
    """At least a little. An output without elements has any: it does not move."""
    return float(values.var().clamp(min=1e-12)) if values.numel() else 1.0


def _of_classes(ours: Tensor, theirs: Tensor, labels: Tensor | None) -> tuple[float, float, float | None]:
    """KL divergence, agreement and accuracy of class scores."""
    expected, found = theirs.double().log_softmax(1), ours.double().log_softmax(1)
    kl = float((expected.exp() * (expected - found)).sum(1).mean())
    first = ours.argmax(1)
    return kl, _share_equal(first, theirs.argmax(1)), None if labels is None else _share_equal(first, labels)


def _share_equal(found: Tensor, expected: Tensor) -> float:
    return float((found == expected.to(found.device)).double().mean())


def judged_samples(graph: Graph, available: int) -> int:
    """How many samples judge a change: enough, as long as the dense network's outputs can be kept."""
    size = sum(bytes_of(node) for node in graph.outputs) or 1
    return min(available, _JUDGED, max(_FEWEST, _OUTPUT_BYTES // size))
