"""The activations of a run: its two streams, and what is kept of the dense network between sweeps."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from ..data.streams import Batches, Stream
from ..devices.memory import Memory
from ..errors import SnowsWarning
from ..graph import Graph
from ..graph.segment import Values
from ..plan import Plan, PlannedLayer
from .footprint import operations_kept
from .problem import LayerProblem
from .settings import Settings


class Activations:
    """The same samples in the dense and in the pruned network.

    Both streams start anew in every sweep. The outputs of the dense network are computed once if they fit in memory,
    and so are the variances of targets that do not change.
    """

    def __init__(
        self, graph: Graph, plan: Plan, batches: Batches, settings: Settings, memory: Memory, readjusts: bool
    ) -> None:
        self._graph, self._batches, self._settings, self._memory = graph, batches, settings, memory
        self._kept = operations_kept(graph, plan, batches.own_samples, settings, memory) if readjusts else []
        self._outputs: dict[int, Values] | None = None
        self._variances: dict[str, float] = {}
        self.restart(graph.parameters)

    def restart(self, weights: Mapping[str, Tensor]) -> None:
        """Move both streams back to the inputs. The pruned one reads `weights` whenever it moves."""
        self._weights = weights
        self._dense = Stream(self._graph, self._graph.parameters, self._batches, self._memory)
        self._pruned = Stream(self._graph, weights, self._batches, self._memory)

    def problem(self, group: tuple[PlannedLayer, ...]) -> LayerProblem:
        """Move the streams to these layers.

        The stream of the dense network follows only where a problem reads it, if its outputs are kept, or if targets
        are those of dense weights on pruned inputs.
        """
        segment = self._graph.segment([planned.layer for planned in group], group[0].horizon)
        self._batches.ranks.together(lambda: self._advance(segment.position))
        targets = self._settings.targets
        # Outputs of the dense network never change. Outputs of dense weights on pruned inputs change with every sweep.
        variances = self._variances if targets == "dense-stream" else {}
        samples = self._batches.own_samples
        room = self._memory.targets(self._graph.live_bytes(segment.position), samples)
        return LayerProblem(segment, self._dense, self._pruned, targets, room, variances, self._outputs)

    def _advance(self, position: int) -> None:
        if self._kept and self._outputs is None:
            values = self._batches.values
            own = self._pruned.own
            outputs = self._graph.outputs_of(self._kept, (values[index] for index in own))
            self._outputs = dict(zip(own, outputs, strict=True))
        if self._outputs is None and self._settings.targets == "dense-stream":
            self._dense.advance(position)
        self._pruned.advance(position)

    def use_smaller_pieces(self, layer: str) -> None:
        """Halve the pieces, after the device ran out of memory at this layer. The streams start anew."""
        torch.cuda.empty_cache()
        if self._batches.smaller is None:
            raise torch.OutOfMemoryError(f"{layer} does not fit the device's memory, not even with single samples")
        before, self._batches = self._batches, self._batches.smaller()
        self._outputs, self._kept = None, []
        self.restart(self._weights)
        warnings.warn(
            f"out of memory at {layer}: going on with {self._batches.sizes[0]} samples at a time instead of "
            f"{before.sizes[0]}",
            SnowsWarning,
            stacklevel=2,
        )
