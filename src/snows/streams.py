"""Activation streams: the same samples on their way through the network, with one set of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .graph import Graph
from .graph.segment import Values


@dataclass(frozen=True)
class Batches:
    """Samples in micro-batches, as named inputs of a graph. The last `held_out` are for judging, not fitting."""

    values: list[Values]
    sizes: tuple[int, ...]  # samples in each micro-batch
    held_out: int = 0


class Stream:
    """For each micro-batch, the values alive at one position of the graph. Moves forward only.

    `parameters` is read at every move, so a weight changed before its layer is passed takes effect.
    """

    def __init__(self, graph: Graph, parameters: Mapping[str, Tensor], batches: Batches) -> None:
        self.graph = graph
        self.parameters = parameters
        self.position = 0
        self.sizes = batches.sizes
        self.batches = [dict(values) for values in batches.values]
        self._fitted = len(self.sizes) - batches.held_out

    @property
    def fitted(self) -> list[Values]:
        """The micro-batches that weights are fitted to."""
        return self.batches[: self._fitted]

    @property
    def held_out(self) -> tuple[int, ...]:
        """Indices of those that it is judged on."""
        return tuple(range(self._fitted, len(self.batches)))

    def advance(self, position: int) -> None:
        """Move all micro-batches; what is not read any more is freed."""
        if position == self.position:
            return
        program = self.graph.program(self.position, position)
        alive = self.graph.live(position)
        for index, values in enumerate(self.batches):
            with torch.no_grad():
                values = {**values, **program(values, self.parameters)}
            self.batches[index] = {name: values[name] for name in alive}
        self.position = position
