"""The last stage, beyond the paper: all kept weights together, matched to the dense network.

The cascade solves one layer at a time, and errors that one layer cannot mend drift along a residual stream. Here all
operations of the network and its outputs are matched together, by gradient descent (Adam) on the kept weights and on
biases, scales and shifts of norms. No labels are used, and the weights of other layers do not change. Images are seen
in random views; held-out samples decide what is kept.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from ..data.samples import Samples
from ..devices.cuda_graph import Replayed
from ..devices.memory import Memory
from ..errors import SnowsWarning
from ..events import Distilled, DistillStep, Listener
from ..graph import Graph
from ..graph.kind import is_image
from ..graph.segment import Values
from .augment import random_views
from .objective import square_sum
from .settings import DistillSettings

_OUTPUT_SHARE = 0.1  # of the loss: the network's outputs; the other operations share the rest
_WARM_UP = 0.05  # share of the steps in which the rate rises
_JUDGEMENTS = 10  # by held-out samples
_VARIANCE_SAMPLES = 64
_LEAST_VARIANCE = 1e-12
Precision = Literal["full", "mixed", "half"]
_BYTES_PER_VALUE = 4  # a pass holds each value, its target, its gradient, and some of what is between them


@dataclass(frozen=True)
class Distillation:
    """What the last stage works with."""

    graph: Graph
    masks: Mapping[str, Tensor]
    fitted: Samples
    held_out: Samples
    settings: DistillSettings
    memory: Memory
    seed: int

    def run(
        self, parameters: Mapping[str, Tensor], notify: Listener = lambda event: None
    ) -> tuple[dict[str, Tensor], Distilled]:
        """Train from `parameters`. Returns what changed: kept weights, with zeros where they are masked, and vectors.

        They are the best on held-out samples of the points that were judged, the start included. A batch that does not
        fit the memory is taken in more pieces.
        """
        batch = min(self.settings.batch, self.fitted.count)
        pieces = _pieces(self.graph, batch, self.memory)
        while True:
            try:
                return self._descend(parameters, pieces, batch // pieces, notify)
            except torch.OutOfMemoryError:
                if pieces == batch:
                    raise
            torch.cuda.empty_cache()
            pieces = min(2 * pieces, batch)
            warnings.warn(
                f"out of memory in the last stage: going on with {batch // pieces} samples at a time",
                SnowsWarning,
                stacklevel=2,
            )

    def _descend(
        self, parameters: Mapping[str, Tensor], pieces: int, size: int, notify: Listener
    ) -> tuple[dict[str, Tensor], Distilled]:
        began = time.perf_counter()
        steps = self.settings.steps
        fitted = self.fitted.moved() if self.fitted.bytes <= self.memory.held else self.fitted
        match = _Match(self.graph, fitted)
        trained = _Trained(parameters, self.masks, self.graph.vectors)
        judge = _Judge(match, self.held_out if self.held_out.count else fitted, size, trained)
        precision = self._precision(next(iter(trained.variables.values())))
        gradient = _Gradient(
            lambda leaves: match.loss(leaves, trained.masked(), precision) / pieces, list(trained.variables.values())
        )
        optimizer = torch.optim.Adam(trained.variables.values(), lr=self.settings.rate, betas=(0.9, 0.99), fused=True)
        generator = torch.Generator().manual_seed(self.seed)
        pause = max(1, steps // _JUDGEMENTS)
        for step in range(1, steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = self.settings.rate * _schedule(step / steps)
            optimizer.zero_grad()
            for _ in range(pieces):
                gradient.add(_views(_drawn(fitted, size, generator), generator))
            optimizer.step()
            notify(DistillStep(step, steps))
            if step % pause == 0 or step == steps:
                judge.ask()
        return judge.best, Distilled(steps, judge.loss_before, judge.lowest, time.perf_counter() - began)

    def _precision(self, example: Tensor) -> Precision:
        """Of gradients: rounding matters little beside the differences between samples. Losses that decide are full."""
        if not self.settings.half_precision or not example.is_cuda or example.dtype != torch.float32:
            return "full"
        return "half" if self.graph.piecewise_linear else "mixed"


class _Trained:
    """The variables: weights under their masks, and vectors."""

    def __init__(self, parameters: Mapping[str, Tensor], masks: Mapping[str, Tensor], vectors: Sequence[str]) -> None:
        self._masks = masks
        self.variables = {name: parameters[name].detach().clone().requires_grad_() for name in [*masks, *vectors]}

    def masked(self) -> dict[str, Tensor]:
        return {n: value * self._masks[n] if n in self._masks else value for n, value in self.variables.items()}


class _Judge:
    """Keeps the variables that were best on the samples it judges by."""

    def __init__(self, match: _Match, samples: Samples, size: int, trained: _Trained) -> None:
        self._match, self._samples, self._size, self._trained = match, samples, size, trained
        self.best = self._snapshot()
        self.loss_before = self.lowest = self._loss()

    def ask(self) -> None:
        loss = self._loss()
        if loss < self.lowest:
            self.lowest, self.best = loss, self._snapshot()

    def _loss(self) -> float:
        with torch.no_grad():
            return self._match.mean_loss(self._samples, self._trained.masked(), self._size)

    def _snapshot(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self._trained.masked().items()}


class _Match:
    """How far the operations and outputs of the network are from those of the dense one, each by its own variance."""

    def __init__(self, graph: Graph, samples: Samples) -> None:
        self.graph = graph
        outputs = [node for node in graph.outputs if isinstance(node.meta.get("val"), Tensor)]
        nodes = list(dict.fromkeys([*graph.operations, *outputs]))
        self.program = graph.giving(nodes, first_order=True)
        with torch.no_grad():
            values = self._run(samples.rows(0, _VARIANCE_SAMPLES), graph.parameters)
        self.weights = _weights(values, nodes, set(outputs))

    def loss(self, leaves: Sequence[Any], parameters: Mapping[str, Tensor], precision: Precision = "full") -> Tensor:
        dense = self.graph.parameters
        parameters = {**dense, **parameters}
        if precision == "half":
            leaves, dense, parameters = pytree.tree_map(_halved, (leaves, dense, parameters))
        device = next(iter(dense.values())).device.type
        with torch.autocast(device, torch.bfloat16, enabled=precision == "mixed", cache_enabled=False):
            with torch.no_grad():
                wanted = self._run(leaves, dense)
            found = self._run(leaves, parameters)
        losses = [weight * _error(found[name], wanted[name]) for name, weight in self.weights.items()]
        return torch.stack(losses).sum()

    def mean_loss(self, samples: Samples, parameters: Mapping[str, Tensor], size: int) -> float:
        """Over samples as they are."""
        total = 0.0
        for start in range(0, samples.count, size):
            stop = min(start + size, samples.count)
            total += (stop - start) * float(self.loss(samples.rows(start, stop), parameters))
        return total / samples.count

    def _run(self, leaves: Sequence[Any], parameters: Mapping[str, Tensor]) -> Values:
        named = dict(zip((node.name for node in self.graph.inputs), leaves, strict=True))
        return self.program(named, parameters)


def _halved(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value


def _error(found: Tensor, wanted: Tensor) -> Tensor:
    error: Tensor = _MeanSquare.apply(found, wanted)  # type: ignore[no-untyped-call]
    return error


class _MeanSquare(torch.autograd.Function):
    """The mean squared error. torch's own takes seven passes over memory where three will do: here most of a step."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, wanted: Tensor) -> Tensor:
        error = found - wanted
        ctx.save_for_backward(error)
        return square_sum(error) / error.numel()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (error,) = ctx.saved_tensors
        return error * (slope * (2 / error.numel())).to(error.dtype), None


def _weights(values: Values, nodes: list[Node], outputs: set[Node]) -> dict[str, float]:
    """The factor of each operation's mean squared error."""
    inner = max(1, len(nodes) - len(outputs))
    return {
        node.name: (_OUTPUT_SHARE / len(outputs) if node in outputs else (1 - _OUTPUT_SHARE) / inner)
        / max(float(values[node.name].var()), _LEAST_VARIANCE)
        for node in nodes
        if values[node.name].is_floating_point()
    }


class _Gradient:
    """Adds a loss's gradient to that of its variables. A small network's operations take less time than their
    launches, so that a pass is replayed where it can be."""

    def __init__(self, loss: Callable[[list[Any]], Tensor], variables: list[Tensor]) -> None:
        leaves: list[Any] = []
        self._leaves, self._variables = leaves, variables
        self._pass = Replayed(
            lambda: torch.autograd.grad(loss(leaves), variables, materialize_grads=True), variables[0].device
        )

    def add(self, leaves: list[Any]) -> None:
        if not self._leaves:
            self._leaves.extend(leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        for mine, new in zip(self._leaves, leaves, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(new)
        for variable, gradient in zip(self._variables, self._pass(), strict=True):
            if variable.grad is None:
                variable.grad = torch.zeros_like(variable)  # whose memory layout the gradient need not have; Adam asks
            variable.grad.add_(gradient)


def _pieces(graph: Graph, batch: int, memory: Memory) -> int:
    """In how many equal pieces a batch is taken so that a pass over the network fits."""
    needed = _BYTES_PER_VALUE * sum(int(node.meta["bytes"]) for node in graph.nodes)
    return min(batch, math.ceil(batch * needed / memory.total))


def _drawn(samples: Samples, count: int, generator: torch.Generator) -> list[Any]:
    chosen = torch.randint(samples.count, (count,), generator=generator)
    leaves = [
        leaf[chosen.to(leaf.device)] if isinstance(leaf, Tensor) and leaf.ndim else leaf for leaf in samples.leaves
    ]
    return replace(samples, leaves=leaves, count=count).rows(0, count)


def _views(leaves: list[Any], generator: torch.Generator) -> list[Any]:
    return [random_views(leaf, generator) if is_image(leaf) else leaf for leaf in leaves]


def _schedule(progress: float) -> float:
    """A short rise, then half a cosine down to nothing."""
    if progress < _WARM_UP:
        return progress / _WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (progress - _WARM_UP) / (1 - _WARM_UP)))
