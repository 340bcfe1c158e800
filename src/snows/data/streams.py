"""Activation streams: the calibration samples on their way through the network, under one set of weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..devices.distributed.ranks import ALONE, Ranks
from ..devices.memory import Memory
from ..devices.offload import on_disk
from ..devices.weights import device_of_weights
from ..graph import Graph
from ..graph.segment import Values
from .samples import Samples


@dataclass(frozen=True)
class Batches:
    """Samples in micro-batches, as named inputs of a graph.

    values    the inputs of each micro-batch
    sizes     samples in each micro-batch
    held_out  how many of the last micro-batches are held out: they judge weights, which are fitted to the others
    smaller   makes the same samples into smaller micro-batches; None if that is impossible
    ranks     who shares the samples. What one process has as one micro-batch is a block of several: every rank owns one
              of them, with every so many-th sample of the block. It may be empty, and is then read by nobody
    places    the first sample of each micro-batch in its block; None: there is one process
    """

    values: Sequence[Values]
    sizes: tuple[int, ...]
    held_out: int = 0
    smaller: Callable[[], Batches] | None = None
    ranks: Ranks = ALONE
    places: tuple[int, ...] | None = None

    @property
    def own_samples(self) -> int:
        """Samples in the micro-batches of this rank."""
        return sum(size for index, size in enumerate(self.sizes) if self.ranks.owns(index))


def cut(fitted: Samples, held_out: Samples, names: Sequence[str], size: int, ranks: Ranks = ALONE) -> Batches:
    """Micro-batches of up to `size` samples, which several ranks share. They are only read when they are needed."""
    parts, places = [], []
    for samples in (fitted, held_out):
        for begin in range(0, samples.count, size):
            for rank in range(ranks.size):
                places.append((rank - begin) % ranks.size)  # so that a rank has the same samples, whatever the size
                rows = range(begin + places[-1], min(begin + size, samples.count), ranks.size)
                parts.append((samples, rows))
    return Batches(
        _Inputs(parts, names),
        tuple(len(rows) for _, rows in parts),
        sum(samples is held_out for samples, _ in parts),
        (lambda: cut(fitted, held_out, names, size // 2, ranks)) if size > 1 else None,
        ranks,
        tuple(places),
    )


class _Inputs(Sequence[Values]):
    """Reads the rows of a micro-batch each time it is indexed."""

    def __init__(self, parts: list[tuple[Samples, range]], names: Sequence[str]) -> None:
        self._parts, self._names = parts, names

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: Any) -> Any:
        samples, rows = self._parts[index]
        leaves = samples.rows(rows.start, rows.stop) if rows.step == 1 else samples.at(torch.tensor(rows))
        return dict(zip(self._names, leaves, strict=True))


class Stream:
    """The activations of all micro-batches at one position of the graph. A stream only moves forward.

    Of several ranks, each holds the micro-batches that it owns. They are `own`; indices count the micro-batches of all.

    `parameters` are read at every move: a weight may change until its layer is passed. Activations that do not fit
    into the device's `memory` are kept in host memory, then on disk, and copied to the device when they are read.
    """

    def __init__(
        self, graph: Graph, parameters: Mapping[str, Tensor], batches: Batches, memory: Memory | None = None
    ) -> None:
        self.graph = graph
        self.parameters = parameters
        self.position = 0
        self.sizes = batches.sizes
        self._places = batches.places or (0,) * len(self.sizes)
        self.fitted = len(self.sizes) - batches.held_out  # number of micro-batches that weights are fitted to
        self.ranks = batches.ranks
        self.own = self.own_of(len(self.sizes))
        self.offloaded = False  # whether some activations are not on the device
        self._memory = memory
        self._inputs = batches.values
        self._values: list[Values | None] = [None] * len(self.sizes)  # None: still the inputs
        self._device: torch.device | None = None  # of the activations, before they were offloaded
        self._narrowed = False  # whether only some samples of each micro-batch are read

    @property
    def held_out(self) -> tuple[int, ...]:
        """The indices of the micro-batches that are held out."""
        return tuple(range(self.fitted, len(self.sizes)))

    @property
    def device(self) -> torch.device:
        return device_of_weights(self.parameters)

    def own_of(self, count: int) -> list[int]:
        """Of the first `count` micro-batches, those of this rank."""
        return [index for index in range(count) if self.ranks.owns(index) and self.sizes[index]]

    @property
    def blocks(self) -> list[range]:
        """The micro-batches that weights are fitted to, in blocks: each would be one micro-batch of a process alone."""
        return [range(first, first + self.ranks.size) for first in range(0, self.fitted, self.ranks.size)]

    def samples_in(self, block: range) -> int:
        return sum(self.sizes[index] for index in block)

    def __getitem__(self, index: int) -> Values:
        values = self._values[index]
        return self._inputs[index] if values is None else self._on_device(values)

    def read(self, index: int, names: Collection[str]) -> Values:
        """Of one micro-batch, those of the named values that exist at this position."""
        values = self._values[index]
        if values is None:
            values = self._inputs[index]
        values = {name: value for name, value in values.items() if name in names}
        if self._narrowed:
            values = {name: value[: self.sizes[index]] for name, value in values.items()}
        return self._on_device(values)

    def narrowed(self, samples: int) -> Stream:
        """A view of the stream at this position that reads the first `samples` samples of each block, at most.

        All values that are read must have samples along their first axis.
        """
        view, step = copy.copy(self), self.ranks.size
        first = [len(range(place, samples, step)) for place in self._places]
        view._narrowed, view.sizes = True, tuple(map(min, self.sizes, first))
        return view

    def advance(self, position: int) -> None:
        """Move all micro-batches to `position`, and free the values that no later operation reads."""
        for stop in self.graph.stops(self.position, position, self.parameters):
            self._move(stop)

    def _move(self, position: int) -> None:
        program = self.graph.program(self.position, position)
        alive = self.graph.live(position)
        on_device, on_host = self._capacity(position)
        moved = 0
        for index in self.own:
            values = self[index]
            with torch.no_grad():
                values = {**values, **program(values, self.parameters)}
            values = {name: values[name] for name in alive}
            moved += self.sizes[index]
            if moved > on_device:
                to_disk = moved > on_device + on_host
                values = {name: self._offload(value, to_disk) for name, value in values.items()}
            self._values[index] = values
        self.offloaded = moved > on_device
        self.position = position

    def _capacity(self, position: int) -> tuple[int, int]:
        """How many samples fit on the device at a position, and how many more in host memory."""
        samples = sum(self.sizes[index] for index in self.own)
        if self._memory is None:
            return samples, 0
        live_bytes = self.graph.live_bytes(position)
        return self._memory.resident(live_bytes, samples), self._memory.hosted(live_bytes)

    def _offload(self, value: Any, to_disk: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        self._device = value.device
        if to_disk:
            return on_disk(value)
        on_host = torch.empty_like(value, device="cpu", pin_memory=value.device.type == "cuda")
        return on_host.copy_(value, non_blocking=True)

    def _on_device(self, values: Values) -> Values:
        if not self.offloaded:
            return values
        return {
            name: value.to(self._device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
