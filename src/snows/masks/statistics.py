"""What network methods may ask for: all weights with their patterns, gradients of single samples, and a loss.

The loss is cross-entropy. If the user gives no labels, the network's own predictions take their place: classes drawn
from them for gradients (whose second moment is then the Fisher matrix itself), and the probabilities for the loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from ..data.moments import gram_of_inputs
from ..data.samples import Samples
from ..data.streams import Stream, cut
from ..devices.distributed.ranks import ALONE, Ranks
from ..devices.weights import rest, where_they_rest
from ..errors import InputError
from ..graph import Graph, Layer
from ..graph.segment import Program, SampleLayout, Values
from ..patterns import Pattern
from .trials import Trial, Trials, judged_samples

_MICRO_BATCH = {"cpu": 100, "cuda": 250}
_LOSS_SAMPLES = 1000  # enough to tell masks apart
_PATCH_BYTES = 1 << 29


class CalibratedNetwork:
    """A network with its calibration samples, as `masks.Network` and `patterns.budgets.Measured`.

    `parameters` are the present weights (default: the dense ones); labels and targets always come from the dense
    network. Gradients are kept for the next question if they fit `keep_bytes`. Before so many samples go through the
    network at once as never before, `compare` is called, which may refuse them.
    """

    def __init__(
        self,
        graph: Graph,
        samples: Samples,
        patterns: Mapping[str, Pattern],
        seed: int,
        labels: Tensor | None = None,
        keep_bytes: int = 0,
        parameters: Mapping[str, Tensor] | None = None,
        compare: Callable[[int], None] = lambda size: None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.graph, self.samples, self.seed, self.ranks = graph, samples, seed, ranks
        self.parameters = copy.copy(graph.parameters if parameters is None else parameters)
        self.patterns = dict(patterns)
        self.layers = sorted((y for y in graph.layers if y.parameter in self.patterns), key=lambda y: y.position)
        weights = where_they_rest(self.parameters)
        self.weights = {layer.parameter: weights[layer.parameter] for layer in self.layers}
        self.uses = {layer.parameter: layer.positions for layer in self.layers}
        self._labels_as_given = labels
        self._keep_bytes, self._compare = keep_bytes, compare
        self._kept: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._predictions: Tensor | None = None

    def gradients(self, count: int, batch: int = 1) -> Iterator[tuple[str, Tensor]]:
        """For each layer, `count` gradients as rows, each the mean over `batch` samples; fewer if samples run out."""
        self._require_all_weights("gradients")
        batch = min(batch, self.samples.count)
        count = min(count, self.samples.count // batch)
        size = count * sum(weight.numel() * weight.element_size() for weight in self.weights.values())
        if (count, batch) not in self._kept and size <= self._keep_bytes:
            self._kept[count, batch] = self._gradients_of(self.layers, count, batch)
        if (count, batch) in self._kept:
            yield from self._kept[count, batch].items()
            return
        for group in self._groups_that_fit(count):
            yield from self._gradients_of(group, count, batch).items()

    def loss(self, weights: Mapping[str, Tensor]) -> float:
        """The mean loss of the network with these weights instead of its own."""
        self._require_all_weights("losses")
        count = min(self.samples.count, _LOSS_SAMPLES)
        targets = self._loss_targets()[:count]
        parameters = {**self.parameters, **weights}

        def summed() -> list[Tensor]:
            total = 0.0
            for rows in self._own_rows(count):
                output = self._logits(self.graph.run(self.samples.at(rows), parameters))
                total += float(F.cross_entropy(output, targets[rows.to(targets.device)], reduction="sum"))
            return [torch.tensor(total, dtype=torch.float64, device=self.samples_device)]

        with torch.no_grad():
            (total,) = self.ranks.sums(
                summed, lambda: [torch.zeros((), dtype=torch.float64, device=self.samples_device)]
            )
        return float(total) / count

    def grams(self) -> Iterator[tuple[str, Tensor]]:
        """For each layer the second moment of its inputs in the dense network."""
        names = [node.name for node in self.graph.inputs]
        batches = cut(*self.samples.split(self.samples.count), names, self._at_once * self.ranks.size, self.ranks)
        stream = Stream(self.graph, self.graph.parameters, batches)
        for layer in self.layers:
            self.ranks.together(partial(stream.advance, layer.position))
            yield layer.parameter, gram_of_inputs(layer, stream)

    def trials(self) -> Iterator[Trial]:
        """Every layer of the dense network, to be changed alone."""
        self._require_all_weights("measurements")
        judged, _ = self.samples.split(judged_samples(self.graph, self.samples.count))
        trials = Trials(self.graph, self.layers, self.samples, judged)  # the same on every rank
        self._compare(trials.at_once)
        yield from trials

    def _require_all_weights(self, needed: str) -> None:
        if rest(self.parameters):
            raise InputError(
                f"{needed} of the whole network need all weights on the device at once, and they do not fit the "
                "memory of this run; give more of it, or masks and budgets by layer, such as mask='wanda' and "
                "'0.5 uniform'"
            )

    def _groups_that_fit(self, count: int) -> Iterator[list[Layer]]:
        """Layers whose gradients fit in memory together; a layer that is too large comes alone."""
        group: list[Layer] = []
        size = 0
        for layer in self.layers:
            weight = self.weights[layer.parameter]
            own = count * weight.numel() * weight.element_size()
            if group and size + own > self._keep_bytes:
                yield group
                group, size = [], 0
            group.append(layer)
            size += own
        yield group

    def _gradients_of(self, layers: list[Layer], count: int, batch: int) -> dict[str, Tensor]:
        """Gradients of some layers from one forward and one backward pass for each micro-batch.

        The gradient of a layer's weight for one sample is the product of that sample's output gradients and inputs.
        """
        nodes = [self.graph.nodes[layer.position] for layer in layers]
        sources = [node.args[0] for node in nodes]
        program = self.graph.giving([*nodes, *sources, *self.graph.outputs])  # type: ignore[list-item]
        labels = self._labels()
        weights = [self.weights[layer.parameter] for layer in layers]

        def zeros() -> list[Tensor]:
            return [weight.new_zeros(count, weight.numel()) for weight in weights]

        def own() -> list[Tensor]:
            tables = zeros()
            for chosen in self._own_rows(count * batch):
                values, slopes = self._slopes(program, nodes, chosen, labels)
                rows = chosen.to(labels.device) // batch
                for layer, node, slope, table in zip(layers, nodes, slopes, tables, strict=True):
                    x = values[layer.input].detach()
                    for part, gradient in _per_sample(layer, node.meta["sample_layout"], x, slope, len(rows)):
                        table.index_add_(0, rows[part], (gradient.flatten(1) / batch).to(table.dtype))
            return tables

        names = [layer.parameter for layer in layers]
        return dict(zip(names, self.ranks.sums(own, zeros), strict=True))

    def _slopes(
        self, program: Program, nodes: list[Node], chosen: Tensor, labels: Tensor
    ) -> tuple[Values, Sequence[Tensor]]:
        """The values of a pass over some samples, and the gradients of their summed loss by some of the values."""
        leaves, parameters = self._varying(self.samples.at(chosen))
        values = dict(zip((node.name for node in self.graph.inputs), leaves, strict=True))
        with torch.enable_grad():
            values |= program(values, parameters)
            logits = self._logits([values[node.name] for node in self.graph.outputs])
            loss = F.cross_entropy(logits, labels[chosen.to(labels.device)], reduction="sum")
            # zeros for layers that the class scores do not depend on, such as those of another output
            return values, torch.autograd.grad(loss, [values[node.name] for node in nodes], materialize_grads=True)

    def _varying(self, leaves: list[Any]) -> tuple[list[Any], Mapping[str, Tensor]]:
        """Inputs and parameters, some of which require gradients, so that every layer's output has one.

        Inputs do if they are floating-point, else the embedding tables that they index. Weights of layers do not: the
        graph's convolutions have a derivative by input or by weight, not by both.
        """
        if any(map(_is_float, leaves)):
            return [leaf.detach().requires_grad_() if _is_float(leaf) else leaf for leaf in leaves], self.parameters
        weights = {layer.parameter for layer in self.graph.layers}
        tables = {name: p for name, p in self.parameters.items() if name not in weights and _is_float(p)}
        return leaves, {**self.parameters, **{n: p.detach().requires_grad_() for n, p in tables.items()}}

    def _own_rows(self, count: int) -> tuple[Tensor, ...]:
        """Of the first `count` samples those that this rank owns, in micro-batches."""
        own = torch.arange(self.ranks.rank, count, self.ranks.size)
        return own.split(self._at_once) if len(own) else ()

    @cached_property
    def _at_once(self) -> int:
        """How many samples go through the network at once, at most."""
        size = min(_MICRO_BATCH.get(self.samples_device.type, 100), self.samples.count)
        self._compare(size)
        return size

    @property
    def samples_device(self) -> torch.device:
        return next(iter(self.weights.values())).device

    @cached_property
    def _given_labels(self) -> Tensor | None:
        labels = self._labels_as_given
        if labels is None:
            return None
        with torch.no_grad():
            classes = self._logits(self.graph.run(self.samples.rows(0, 1))).shape[1]
        if int(labels.min()) < 0 or int(labels.max()) >= classes:
            raise InputError(
                f"labels='given': labels go from {int(labels.min())} to {int(labels.max())}, but the model has "
                f"{classes} classes; expected 0 to {classes - 1}"
            )
        return labels.to(self.samples_device)

    def _labels(self) -> Tensor:
        """One class for each sample, for gradients."""
        if self._given_labels is not None:
            return self._given_labels
        probabilities = self._predict().double().softmax(1).cpu()
        generator = torch.Generator().manual_seed(self.seed)
        return torch.multinomial(probabilities, 1, generator=generator).flatten().to(self.samples_device)

    def _loss_targets(self) -> Tensor:
        """Classes, or probabilities of classes."""
        if self._given_labels is not None:
            return self._given_labels
        return self._predict().softmax(1)

    def _predict(self) -> Tensor:
        """The class scores of the dense network, of all samples."""
        if self._predictions is None:
            count = self.samples.count
            with torch.no_grad():
                example = self._logits(self.graph.run(self.samples.rows(0, 1)))

                def zeros() -> list[Tensor]:
                    return [example.new_zeros(count, example.shape[1])]

                def own() -> list[Tensor]:
                    (table,) = zeros()
                    for rows in self._own_rows(count):
                        table[rows.to(table.device)] = self._logits(self.graph.run(self.samples.at(rows)))
                    return [table]

                (self._predictions,) = self.ranks.sums(own, zeros)
        return self._predictions

    @staticmethod
    def _logits(outputs: list[object]) -> Tensor:
        for output in outputs:
            if isinstance(output, Tensor) and output.ndim == 2 and output.is_floating_point():
                return output
        shapes = ", ".join(str(tuple(o.shape)) for o in outputs if isinstance(o, Tensor))
        raise InputError(
            f"this mask method needs class scores (samples x classes); the model gives tensors of shape {shapes}. "
            "Choose a method without gradients, such as 'obc' or 'magnitude'"
        )


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _per_sample(
    layer: Layer, layout: SampleLayout | None, x: Tensor, slope: Tensor, samples: int
) -> Iterator[tuple[slice, Tensor]]:
    """Ranges of the samples, each with its gradients: samples x outputs x columns."""
    if not layer.is_convolution:
        if layout is None:
            raise InputError(f"{layer.name} mixes samples: there are no gradients of single samples for it")
        x, slope = (layout.split(value, samples).reshape(samples, -1, value.shape[-1]) for value in (x, slope))
        yield slice(0, samples), slope.mT @ x
        return
    positions = slope[0, 0].numel()
    at_once = max(1, int(_PATCH_BYTES / (positions * layer.columns * layer.groups * x.element_size())))
    for begin in range(0, samples, at_once):
        part = slice(begin, min(begin + at_once, samples))
        size = part.stop - begin
        patches = layer.patches(x[part]).unflatten(1, (size, -1))  # groups x samples x positions x columns
        outputs = layer.outputs(slope[part]).unflatten(1, (size, -1))
        yield part, layer.in_weight_order((outputs.mT @ patches).transpose(0, 1), -1)
