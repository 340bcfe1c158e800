"""The K-step problem of one layer, or of some that are solved together: from two activation streams to an objective and
the moments of its closed form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from ..data.moments import Moments, gram_of_inputs, in_weight_order, samples_at_once
from ..data.streams import Stream
from ..graph import Layer, Segment
from ..graph.autodiff import LinearMap
from ..graph.segment import Program, Values
from .objective import Normalization, Objective, Piece
from .packing import Packing

_VARIANCE_SAMPLES = 1000  # enough for a scale factor
_LEAST_VARIANCE = 1e-12
_POSITIONS_PER_COLUMN = 4  # so that second moments are far from singular


def live_in(segment: Segment, stream: Stream, index: int, parameters: Mapping[str, Tensor]) -> Values:
    """What a segment reads of one micro-batch."""
    values = stream.read(index, {*segment.prelude.reads, *segment.body.reads})
    with torch.no_grad():
        return {**values, **segment.prelude(values, parameters)}


@dataclass(frozen=True)
class Teacher:
    """What a segment's operations should give: dense weights on the dense network's activations or on the pruned
    network's, as the stream is."""

    segment: Segment
    stream: Stream
    parameters: Mapping[str, Tensor]
    outputs: Sequence[Values] | None = None  # of each micro-batch, where they are known

    def targets(self, index: int) -> tuple[Tensor, ...]:
        if self.outputs is not None:
            return tuple(self.outputs[index][name] for name in self.segment.outputs)
        values = live_in(self.segment, self.stream, index, self.parameters)
        with torch.no_grad():
            found = self.segment.body(values, self.parameters)
        return tuple(found[name] for name in self.segment.outputs)


@dataclass
class LayerProblem:
    """Match the dense network's operations 0 … K after the segment's layers, as a function of their weights, packed.

    Objective and moments are those of the fitted samples; `held_out` names the pieces that are for judging alone.

    Targets and live-in values are kept between passes while they fit `keep_bytes`, and recomputed for each pass beyond.
    """

    segment: Segment
    dense: Stream
    pruned: Stream
    targets_from: str  # "dense-stream" or "dense-weights", see Recipe
    keep_bytes: int
    variances: dict[str, float] = field(default_factory=dict)  # of targets, where they are known already
    dense_outputs: Sequence[Values] | None = None  # of the dense stream's operations, where they are known
    _kept: dict[int, Piece] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layers = self.segment.layers
        self.packing = Packing(tuple(layer.shape for layer in self.layers))
        self.sizes = self.pruned.sizes
        self.held_out = self.pruned.held_out
        stream = self.dense if self.targets_from == "dense-stream" else self.pruned
        self._teacher = Teacher(self.segment, stream, self.dense.parameters, self.dense_outputs)
        cost = self.segment.cost
        held = cost.prelude_bytes + (cost.input_bytes if self.pruned.offloaded else 0)  # the stream holds them
        if self.dense_outputs is None:
            held += cost.output_bytes
        self._keeps = held * sum(self.sizes) <= self.keep_bytes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Piece:
        if index in self._kept:
            return self._kept[index]
        # The function must not hold this object, which holds the function: activations would outlive their layer until
        # the garbage collector came round.
        values = live_in(self.segment, self.pruned, index, self.pruned.parameters)
        values = {name: values[name] for name in self.segment.body.reads}
        later = {name: self.pruned.parameters[name] for name in self.segment.body.parameters}
        body, outputs = self.segment.body, self.segment.outputs
        pack, unpack = self.packing.pack, self.packing.unpack
        names = [layer.parameter for layer in self.layers]

        def parameters(packed: Tensor) -> dict[str, Tensor]:
            return {**later, **dict(zip(names, unpack(packed), strict=True))}

        def forward(packed: Tensor) -> tuple[Tensor, ...]:
            results = body(values, parameters(packed))
            return tuple(results[name] for name in outputs)

        def linearize(packed: Tensor, dtype: torch.dtype) -> tuple[list[Tensor], LinearMap]:
            results, chain = body.linearize(values, parameters(packed), names, dtype)
            return results, LinearMap(
                lambda v: chain.push(unpack(v)), lambda u, factors: pack(chain.pull(u, factors)).to(packed.dtype)
            )

        piece = Piece(forward, partial(self._teacher.targets, index), self.sizes[index], linearize)
        if self._keeps:
            self._kept[index] = piece
        return piece

    def narrowed(self, samples: int) -> LayerProblem:
        """The same problem with no more than so many samples of each piece, where that can be."""
        if samples >= max(self.sizes) or not self.segment.batch_first:
            return self
        dense, pruned = self.dense.narrowed(samples), self.pruned.narrowed(samples)
        outputs = self.dense_outputs
        if outputs is not None:  # which have samples along their first axis, maybe with more inside
            shares = [Fraction(new, old) for new, old in zip(dense.sizes, self.sizes, strict=True)]
            names = self.segment.outputs
            outputs = [
                {name: values[name][: int(len(values[name]) * share)] for name in names}
                for values, share in zip(outputs, shares, strict=True)
            ]
        return replace(self, dense=dense, pruned=pruned, dense_outputs=outputs, _kept={})

    def objective(self, normalization: Normalization, precision: torch.dtype | None = None) -> Objective:
        weights = [1.0] * len(self.segment.outputs)
        if normalization == "variance":
            weights = [1 / max(variance, _LEAST_VARIANCE) for variance in self._variances()]
        fitted = tuple(range(self.pruned.fitted))
        layouts = self.segment.sample_layouts
        return Objective(self, tuple(weights), normalization, fitted, self.sizes, layouts, precision)

    def moments(self, index: int = 0) -> Moments:
        """Of a layer's inputs, and of those with the outputs the layer itself should have."""
        layer, own = self.layers[index], self.segment.own[index]
        return in_weight_order(layer, Moments.collect(self._input_output_pairs(layer, own)))

    def gram(self, index: int = 0, samples: int | None = None) -> Tensor:
        """The second moment of a layer's inputs. About so many `samples` will do, where these tell the inputs apart."""
        layer, pieces = self.layers[index], self.pruned.fitted
        if samples is not None:
            wanted = max(samples, _POSITIONS_PER_COLUMN * layer.columns / layer.positions)
            pieces = min(pieces, math.ceil(wanted / self.sizes[0]))
        return gram_of_inputs(layer, self._inputs(layer, self.pruned, pieces))

    def dense_gram(self, index: int = 0) -> Tensor:
        """The same in the dense network."""
        return gram_of_inputs(self.layers[index], self._inputs(self.layers[index], self.dense, self.dense.fitted))

    def _inputs(self, layer: Layer, stream: Stream, pieces: int) -> Iterator[Tensor]:
        return (self._input(layer, stream, index, stream.parameters) for index in range(pieces))

    def _input(self, layer: Layer, stream: Stream, index: int, parameters: Mapping[str, Tensor]) -> Tensor:
        """What a layer reads; where layers are solved together it may come after the first of them."""
        values = stream.read(index, [layer.input])
        x: Tensor = (values or live_in(self.segment, stream, index, parameters))[layer.input]
        return x

    def _input_output_pairs(self, layer: Layer, own: Program) -> Iterator[tuple[Tensor, Tensor]]:
        stream = self._teacher.stream
        for index, x in enumerate(self._inputs(layer, self.pruned, self.pruned.fitted)):
            taught = x if stream is self.pruned else self._input(layer, stream, index, self.dense.parameters)
            y = own({layer.input: taught}, self.dense.parameters)[own.gives[0]]
            if layer.bias is not None:
                bias = self.dense.parameters[layer.bias]
                y = y - (bias.view(-1, *[1] * (y.ndim - 2)) if layer.is_convolution else bias)
            rows = samples_at_once(layer, x)
            for part, target in zip(x.split(rows), y.split(rows), strict=True):
                yield layer.patches(part), layer.outputs(target)

    def _variances(self) -> list[float]:
        """Of each operation's target over all its elements, however the samples are split into micro-batches."""
        unknown = [k for k, name in enumerate(self.segment.outputs) if name not in self.variances]
        count = dict.fromkeys(unknown, 0)
        mean = dict.fromkeys(unknown, 0.0)
        spread = dict.fromkeys(unknown, 0.0)  # sum of squared distances from the mean
        seen = 0
        for index in range(self.pruned.fitted) if unknown else ():
            targets = self[index].targets
            for k in unknown:
                variance, own = torch.var_mean(targets[k], correction=0)
                new, gap = targets[k].numel(), float(own) - mean[k]
                spread[k] += new * float(variance) + gap**2 * count[k] * new / (count[k] + new)
                count[k] += new
                mean[k] += gap * new / count[k]
            seen += self.sizes[index]
            if seen >= _VARIANCE_SAMPLES:
                break
        self.variances.update({self.segment.outputs[k]: spread[k] / count[k] for k in unknown})
        return [self.variances[name] for name in self.segment.outputs]
