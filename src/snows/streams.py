"""Activation streams: the same samples on their way through the network, with one set of weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .graph import Graph
from .graph.segment import Values


class Stream:
    """For each micro-batch, the values alive at one position of the graph. Moves forward only.

    `parameters` is read at every move, so a weight changed before its layer is passed takes effect.
    """

    def __init__(
        self, graph: Graph, parameters: Mapping[str, Tensor], batches: list[Values], sizes: tuple[int, ...]
    ) -> None:
        self.graph = graph
        self.parameters = parameters
        self.position = 0
        self.sizes = sizes  # samples in each micro-batch
        self.batches = [dict(values) for values in batches]

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
