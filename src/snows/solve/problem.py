"""The K-step problem of a group of layers, from two activation streams that have arrived at it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from ..data.moments import Moments, gram_of_inputs, in_weight_order, no_moments, samples_at_once
from ..data.streams import Stream
from ..graph import Layer, Segment
from ..graph.autodiff import LinearMap
from ..graph.segment import Program, Values
from .objective import Normalization, Objective, Piece
from .packing import Packing

_VARIANCE_SAMPLES = 1000  # enough for a scale factor
_LEAST_VARIANCE = 1e-12
_POSITIONS_PER_COLUMN = 4  # keeps second moments far from singular


def segment_inputs(segment: Segment, stream: Stream, index: int, parameters: Mapping[str, Tensor]) -> Values:
    """What a segment reads of one micro-batch: values of the stream, and what the prelude computes from them."""
    values = stream.read(index, {*segment.prelude.reads, *segment.body.reads})
    with torch.no_grad():
        return {**values, **segment.prelude(values, parameters)}


@dataclass(frozen=True)
class Teacher:
    """The targets of a segment: the outputs of dense weights on the activations of a stream."""

    segment: Segment
    stream: Stream  # of the dense network, or of the pruned one
    parameters: Mapping[str, Tensor]
    outputs: Mapping[int, Values] | None = None  # of each micro-batch, if they were computed before

    def targets(self, index: int) -> tuple[Tensor, ...]:
        if self.outputs is not None:
            return tuple(self.outputs[index][name] for name in self.segment.outputs)
        values = segment_inputs(self.segment, self.stream, index, self.parameters)
        with torch.no_grad():
            outputs = self.segment.body(values, self.parameters)
        return tuple(outputs[name] for name in self.segment.outputs)


@dataclass
class LayerProblem:
    """Match the dense network's operations 0 … K after the layers, as a function of their packed weights.

    Objective and moments are of the fitted samples; `held_out` are the micro-batches of the held-out samples. Targets
    and inputs of the segment are kept between passes if they fit in `keep_bytes`, and computed again in each pass if
    not.
    """

    segment: Segment
    dense: Stream
    pruned: Stream
    targets_from: str  # "dense-stream" or "dense-weights", see Recipe
    keep_bytes: int
    variances: dict[str, float] = field(default_factory=dict)  # of targets, as far as they are known; filled here
    dense_outputs: Mapping[int, Values] | None = None  # of the dense network's operations, if they were computed before
    _kept: dict[int, Piece] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layers = self.segment.layers
        self.packing = Packing(tuple(layer.shape for layer in self.layers))
        self.sizes, self.blocks = self.pruned.sizes, self.pruned.blocks
        self.held_out = self.pruned.held_out
        stream = self.dense if self.targets_from == "dense-stream" else self.pruned
        self._teacher = Teacher(self.segment, stream, self.dense.parameters, self.dense_outputs)
        cost = self.segment.cost
        sample_bytes = cost.prelude_bytes
        if self.pruned.offloaded:  # inputs are copied to the device; otherwise the stream holds them there
            sample_bytes += cost.input_bytes
        if self.dense_outputs is None:
            sample_bytes += cost.output_bytes
        # Read once, as weights that do not fit the device might be copied anew for every piece.
        self._later = {name: self.pruned.parameters[name] for name in self.segment.body.parameters}
        self._keeps = sample_bytes * sum(self.sizes[index] for index in self.pruned.own) <= self.keep_bytes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Piece:
        if index in self._kept:
            return self._kept[index]
        # The closures below must not hold `self`. It holds them, and in such a cycle the activations of a layer would
        # stay in memory until the garbage collector runs.
        values = segment_inputs(self.segment, self.pruned, index, self.pruned.parameters)
        values = {name: values[name] for name in self.segment.body.reads}
        body, outputs, later = self.segment.body, self.segment.outputs, self._later
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

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Samples in each block. A process alone has one piece in each, and several ranks must choose as it does."""
        return tuple(map(self.pruned.samples_in, self.blocks))

    def pieces_of(self, blocks: Sequence[int]) -> list[int]:
        return [piece for block in blocks for piece in self.blocks[block]]

    def narrowed(self, samples: int) -> LayerProblem:
        """The same problem with at most so many samples of each block. Unchanged if samples cannot be cut off."""
        if samples >= max(*self.block_sizes, *self.sizes) or not self.segment.batch_first:
            return self
        dense, pruned = self.dense.narrowed(samples), self.pruned.narrowed(samples)
        outputs = self.dense_outputs
        if outputs is not None:  # the first axis is the samples', or samples times something
            shares = {index: Fraction(dense.sizes[index], self.sizes[index]) for index in outputs}
            names = self.segment.outputs
            outputs = {
                index: {name: values[name][: int(len(values[name]) * shares[index])] for name in names}
                for index, values in outputs.items()
            }
        return replace(self, dense=dense, pruned=pruned, dense_outputs=outputs, _kept={})

    def objective(self, normalization: Normalization, precision: torch.dtype | None = None) -> Objective:
        weights = [1.0] * len(self.segment.outputs)
        if normalization == "variance":
            weights = [1 / max(variance, _LEAST_VARIANCE) for variance in self._variances()]
        fitted = tuple(range(self.pruned.fitted))
        layouts = self.segment.sample_layouts
        ranks = self.pruned.ranks
        return Objective(self, tuple(weights), normalization, fitted, self.sizes, layouts, precision, ranks)

    def moments(self, index: int = 0) -> Moments:
        """Second moments of a layer's inputs, with themselves and with the outputs the layer itself should have."""
        layer, own = self.layers[index], self.segment.own[index]
        zeros = no_moments(layer, layer.shape[0] // layer.groups, self.pruned.device)
        return in_weight_order(layer, Moments.collect(self._input_output_pairs(layer, own), self.pruned.ranks, zeros))

    def gram(self, index: int = 0, samples: int | None = None) -> Tensor:
        """The second moment of a layer's inputs, from about so many samples (None: all)."""
        layer, pieces = self.layers[index], self.pruned.fitted
        if samples is not None:
            wanted = max(samples, _POSITIONS_PER_COLUMN * layer.columns / layer.positions)
            blocks = math.ceil(wanted / self.block_sizes[0])
            pieces = min(pieces, blocks * len(self.blocks[0]))
        return gram_of_inputs(layer, self.pruned, self._inputs(layer, self.pruned, pieces))

    def dense_gram(self, index: int = 0) -> Tensor:
        """The same in the dense network, from all samples."""
        layer = self.layers[index]
        self.dense.ranks.together(lambda: self.dense.advance(self.segment.position))
        return gram_of_inputs(layer, self.dense, self._inputs(layer, self.dense, self.dense.fitted))

    def _inputs(self, layer: Layer, stream: Stream, pieces: int) -> Iterator[Tensor]:
        return (self._input(layer, stream, index, stream.parameters) for index in stream.own_of(pieces))

    def _input(self, layer: Layer, stream: Stream, index: int, parameters: Mapping[str, Tensor]) -> Tensor:
        """What a layer reads. Of several layers, a later one may read what the prelude computes."""
        values = stream.read(index, [layer.input])
        x: Tensor = (values or segment_inputs(self.segment, stream, index, parameters))[layer.input]
        return x

    def _input_output_pairs(self, layer: Layer, own: Program) -> Iterator[tuple[Tensor, Tensor]]:
        for index in self.pruned.own_of(self.pruned.fitted):
            x = self._input(layer, self.pruned, index, self.pruned.parameters)
            y = self._dense_output(layer, own, index, x)
            if layer.bias is not None:
                bias = self.dense.parameters[layer.bias]
                y = y - (bias.view(-1, *[1] * (y.ndim - 2)) if layer.is_convolution else bias)
            rows = samples_at_once(layer, x)
            for part, target in zip(x.split(rows), y.split(rows), strict=True):
                yield layer.patches(part), layer.outputs(target)

    def _dense_output(self, layer: Layer, own: Program, index: int, x: Tensor) -> Tensor:
        """What dense weights give for one micro-batch, on dense activations or on those of the pruned network, `x`."""
        if self.dense_outputs is not None and own.gives[0] in self.dense_outputs[index]:
            computed: Tensor = self.dense_outputs[index][own.gives[0]]
            return computed
        if self._teacher.stream is not self.pruned:
            self.dense.advance(self.segment.position)
            x = self._input(layer, self.dense, index, self.dense.parameters)
        output: Tensor = own({layer.input: x}, self.dense.parameters)[own.gives[0]]
        return output

    def _variances(self) -> list[float]:
        """Of the targets of each operation, over all elements of the first samples."""
        names = self.segment.outputs
        unknown = [k for k, name in enumerate(names) if name not in self.variances]
        if unknown:
            ranks, pieces = self.pruned.ranks, self._pieces_with(_VARIANCE_SAMPLES)
            pools = ranks.gathered(ranks.together(lambda: self._pools(unknown, self.pruned.own_of(pieces))))
            self.variances.update({names[k]: _Pool.joined(own[k] for own in pools).variance for k in unknown})
        return [self.variances[name] for name in names]

    def _pools(self, outputs: Sequence[int], pieces: Sequence[int]) -> dict[int, _Pool]:
        """The targets of some operations in some micro-batches."""
        pools = {k: _Pool() for k in outputs}
        for index in pieces:
            targets = self[index].targets
            for k, pool in pools.items():
                pool.add(targets[k])
        return pools

    def _pieces_with(self, samples: int) -> int:
        """How many of the first micro-batches have so many samples together; all fitted ones if these have fewer."""
        count = 0
        for block in self.blocks:
            count += self.pruned.samples_in(block)
            if count >= samples:
                return block.stop
        return self.pruned.fitted


@dataclass
class _Pool:
    """The variance of numbers that arrive in parts. It does not depend on how they are cut (Chan et al. 1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean

    def add(self, part: Tensor) -> None:
        variance, mean = torch.var_mean(part, correction=0)
        self._join(part.numel(), float(mean), part.numel() * float(variance))

    def _join(self, count: int, mean: float, squares: float) -> None:
        if not count:
            return
        gap = mean - self.mean
        self.squares += squares + gap**2 * self.count * count / (self.count + count)
        self.count += count
        self.mean += gap * count / self.count

    @classmethod
    def joined(cls, pools: Iterable[_Pool]) -> _Pool:
        """The numbers of all pools."""
        whole = cls()
        for pool in pools:
            whole._join(pool.count, pool.mean, pool.squares)
        return whole

    @property
    def variance(self) -> float:
        return self.squares / self.count
