"""Activation streams: the same samples on their way through the network, with one set of weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..devices.memory import Memory
from ..devices.offload import on_disk
from ..graph import Graph
from ..graph.segment import Values
from .samples import Samples


@dataclass(frozen=True)
class Batches:
    """Samples in micro-batches, as named inputs of a graph. The last `held_out` are for judging, not fitting."""

    values: Sequence[Values]
    sizes: tuple[int, ...]  # samples in each micro-batch
    held_out: int = 0
    smaller: Callable[[], Batches] | None = None  # the same samples in smaller micro-batches, where that can be


def cut(fitted: Samples, held_out: Samples, names: Sequence[str], size: int) -> Batches:
    """Micro-batches of `size` samples, read from where the samples are when they are asked for."""
    parts = [
        (samples, begin, min(begin + size, samples.count))
        for samples in (fitted, held_out)
        for begin in range(0, samples.count, size)
    ]
    return Batches(
        _Inputs(parts, names),
        tuple(end - begin for _, begin, end in parts),
        sum(samples is held_out for samples, _, _ in parts),
        (lambda: cut(fitted, held_out, names, size // 2)) if size > 1 else None,
    )


class _Inputs(Sequence[Values]):
    def __init__(self, parts: list[tuple[Samples, int, int]], names: Sequence[str]) -> None:
        self._parts, self._names = parts, names

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: Any) -> Any:
        samples, begin, end = self._parts[index]
        return dict(zip(self._names, samples.rows(begin, end), strict=True))


class Stream:
    """For each micro-batch, the values alive at one position of the graph. Moves forward only.

    `parameters` is read at every move, so a weight changed before its layer is passed takes effect. What does not fit
    the `memory` rests in the host's or on disk, and comes to the device when it is asked for.
    """

    def __init__(
        self, graph: Graph, parameters: Mapping[str, Tensor], batches: Batches, memory: Memory | None = None
    ) -> None:
        self.graph = graph
        self.parameters = parameters
        self.position = 0
        self.sizes = batches.sizes
        self.fitted = len(self.sizes) - batches.held_out  # micro-batches that weights are fitted to
        self.rests = False  # whether some values are elsewhere
        self._memory = memory
        self._inputs = batches.values
        self._values: list[Values | None] = [None] * len(self.sizes)  # None: the inputs themselves
        self._device: torch.device | None = None  # where values come from
        self._most: int | None = None  # samples of each micro-batch that are read

    def __getitem__(self, index: int) -> Values:
        values = self._values[index]
        return self._inputs[index] if values is None else self._fetched(values)

    def read(self, index: int, names: Collection[str]) -> Values:
        """Of one micro-batch those of these values that there are."""
        values = self._values[index]
        if values is None:
            values = self._inputs[index]
        values = {name: value for name, value in values.items() if name in names}
        if self._most is not None:
            values = {name: value[: self._most] for name, value in values.items()}
        return self._fetched(values)

    def narrowed(self, samples: int) -> Stream:
        """The same stream where it is now, of which no more than so many samples of each micro-batch are read.

        Only for values with samples along their first axis."""
        other = copy.copy(self)
        other._most, other.sizes = samples, tuple(min(size, samples) for size in self.sizes)
        return other

    def _fetched(self, values: Values) -> Values:
        if not self.rests:
            return values
        return {
            name: value.to(self._device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }

    @property
    def held_out(self) -> tuple[int, ...]:
        """The micro-batches that it is judged on."""
        return tuple(range(self.fitted, len(self.sizes)))

    def advance(self, position: int) -> None:
        """Move all micro-batches; what is not read any more is freed."""
        if position == self.position:
            return
        program = self.graph.program(self.position, position)
        alive = self.graph.live(position)
        resident, hosted = sum(self.sizes), 0
        if self._memory is not None:
            live_bytes = self.graph.live_bytes(position)
            resident, hosted = self._memory.resident(live_bytes, resident), self._memory.hosted(live_bytes)
        moved = 0
        for index, size in enumerate(self.sizes):
            values = self[index]
            with torch.no_grad():
                values = {**values, **program(values, self.parameters)}
            values = {name: values[name] for name in alive}
            moved += size
            if moved > resident:
                values = {name: self._at_rest(v, moved > resident + hosted) for name, v in values.items()}
            self._values[index] = values
        self.rests = moved > resident
        self.position = position

    def _at_rest(self, value: Any, disk: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        self._device = value.device
        if disk:
            return on_disk(value)
        on_host = torch.empty_like(value, device="cpu", pin_memory=value.device.type == "cuda")
        return on_host.copy_(value, non_blocking=True)
