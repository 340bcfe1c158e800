"""The last stage, beyond the paper: all kept weights are trained together to match the dense network.

The cascade solves one layer at a time. Errors that one layer cannot repair accumulate, above all along residual
streams. Here Adam trains all kept weights, biases, and scales and shifts of norms at once, so that all operations and
outputs of the network match those of the dense one. No labels are used, and layers that stay dense keep their weights.
Every step sees random views of images. The best weights on held-out samples are kept.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from ..data.batches import has_rows
from ..data.samples import Samples
from ..devices.cuda_graph import ReplayedOn
from ..devices.distributed.ranks import ALONE, Ranks
from ..devices.memory import Memory, one_out_of_memory
from ..errors import SnowsWarning
from ..events import Distilled, DistillStep, Listener, ignore
from ..graph import Graph
from ..graph.kind import is_image
from ..graph.segment import Values
from .augment import random_views
from .footprint import ending_soon
from .objective import square_sum
from .settings import DistillSettings

_OUTPUT_SHARE = 0.1  # share of the loss for the network's outputs; the other operations share the rest
_WARM_UP = 0.05  # share of the steps in which the learning rate rises
_EVALUATIONS = 10  # on held-out samples
_VARIANCE_SAMPLES = 64
_LEAST_VARIANCE = 1e-12
_COPIES = 4  # of every value in a training pass: the value, its target, its gradient, and temporaries

Precision = Literal["full", "mixed", "half"]


@dataclass(frozen=True)
class Distillation:
    """The last stage of one run."""

    graph: Graph
    masks: Mapping[str, Tensor]
    fitted: Samples
    held_out: Samples
    settings: DistillSettings
    memory: Memory
    seed: int
    ranks: Ranks = ALONE

    def run(self, parameters: Mapping[str, Tensor], notify: Listener = ignore) -> tuple[dict[str, Tensor], Distilled]:
        """Train from `parameters`. If a batch runs out of memory, it is cut into more pieces.

        Returns:
            The trained weights (zero where they are masked) and vectors, and how the stage went. They are the best on
            held-out samples among the start and the points that were evaluated.
        """
        batch = min(self.settings.batch, self.fitted.count)
        device = next(iter(parameters.values())).device
        share = self.ranks.share(batch)  # that a rank takes
        pieces = _pieces(self.graph, share, self.memory, device)
        while True:
            try:
                with one_out_of_memory():
                    return self._train(parameters, pieces, batch // pieces, notify)
            except self.ranks.out_of_memory:
                if pieces >= share:
                    raise
            torch.cuda.empty_cache()
            pieces = min(2 * pieces, share)
            warnings.warn(
                f"out of memory in the last stage: going on with {batch // pieces} samples at a time",
                SnowsWarning,
                stacklevel=2,
            )

    def _train(
        self, parameters: Mapping[str, Tensor], pieces: int, size: int, notify: Listener
    ) -> tuple[dict[str, Tensor], Distilled]:
        began = time.perf_counter()
        steps = self.settings.steps
        fitted = self.fitted.moved() if self.fitted.bytes <= self.memory.held else self.fitted
        match = _Match(self.graph, fitted, self.ranks)
        trained = _Trained(parameters, self.masks, self.graph.vectors)
        best = _Best(match, self.held_out if self.held_out.count else fitted, size, trained)
        precision = self._precision(next(iter(trained.variables.values())))
        variables, part = list(trained.variables.values()), self.ranks.part(size)
        share = (part.stop - part.start) / size  # of a piece
        gradient = _Gradient(
            lambda leaves: share * match.loss(leaves, trained.masked(), precision) / pieces, variables, self.ranks
        )
        optimizer = torch.optim.Adam(trained.variables.values(), lr=self.settings.rate, betas=(0.9, 0.99), fused=True)
        generator = torch.Generator().manual_seed(self.seed)
        pause = max(1, steps // _EVALUATIONS)

        def batches() -> Iterator[list[Any] | None]:
            """One step's pieces: all ranks make the same views, and each takes its part of them."""
            for _ in range(pieces):
                chosen = torch.randint(fitted.count, (size,), generator=generator)
                views = _views(fitted.at_shared(chosen, self.ranks), generator)
                yield [leaf[part] if has_rows(leaf) else leaf for leaf in views] if share else None

        for step in range(1, steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = self.settings.rate * _schedule(step / steps)
            optimizer.zero_grad()
            gradient.add(batches())
            optimizer.step()
            notify(DistillStep(step, steps))
            if step % pause == 0 or step == steps:
                best.update(step)
        seconds = time.perf_counter() - began
        return best.values, Distilled(steps, best.loss_before, best.loss, seconds, tuple(best.curve))

    def _precision(self, example: Tensor) -> Precision:
        """Of gradients, whose rounding is small beside their noise. Losses of held-out samples have full precision."""
        if not self.settings.half_precision or not example.is_cuda or example.dtype != torch.float32:
            return "full"
        return "half" if self.graph.piecewise_linear else "mixed"


class _Trained:
    """The trained variables: weights with masks, and vectors (biases, and scales and shifts of norms)."""

    def __init__(self, parameters: Mapping[str, Tensor], masks: Mapping[str, Tensor], vectors: Sequence[str]) -> None:
        self._masks = masks
        self.variables = {name: parameters[name].detach().clone().requires_grad_() for name in [*masks, *vectors]}

    def masked(self) -> dict[str, Tensor]:
        return {n: value * self._masks[n] if n in self._masks else value for n, value in self.variables.items()}


class _Best:
    """The variables with the lowest loss on some samples, of those it has seen."""

    def __init__(self, match: _Match, samples: Samples, size: int, trained: _Trained) -> None:
        self._match, self._samples, self._size, self._trained = match, samples, size, trained
        self.values = self._snapshot()
        self.loss_before = self.loss = self._current_loss()
        self.curve = [(0, self.loss)]

    def update(self, step: int) -> None:
        loss = self._current_loss()
        self.curve.append((step, loss))
        if loss < self.loss:
            self.loss, self.values = loss, self._snapshot()

    def _current_loss(self) -> float:
        with torch.no_grad():
            return self._match.mean_loss(self._samples, self._trained.masked(), self._size)

    def _snapshot(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self._trained.masked().items()}


def matched(graph: Graph) -> Sequence[Node]:
    """The operations whose outputs are matched, beside the network's own."""
    return graph.operations


class _Match:
    """The distance of the network's operations and outputs from the dense network's, each divided by its variance."""

    def __init__(self, graph: Graph, samples: Samples, ranks: Ranks = ALONE) -> None:
        self.graph, self.ranks = graph, ranks
        self.device = next(iter(graph.parameters.values())).device
        outputs = [node for node in graph.outputs if isinstance(node.meta.get("val"), Tensor)]
        nodes = list(dict.fromkeys([*matched(graph), *outputs]))
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
                targets = self._run(leaves, dense)
            outputs = self._run(leaves, parameters)
        losses = [weight * _error(outputs[name], targets[name]) for name, weight in self.weights.items()]
        return torch.stack(losses).sum()

    def mean_loss(self, samples: Samples, parameters: Mapping[str, Tensor], size: int) -> float:
        """The mean over all samples, without random views."""
        size = min(size, self.ranks.share(samples.count))

        def number(value: float) -> list[Tensor]:
            return [torch.tensor(value, dtype=torch.float64, device=self.device)]

        def summed() -> list[Tensor]:
            total = 0.0
            for index, start in enumerate(range(0, samples.count, size)):
                stop = min(start + size, samples.count)
                if self.ranks.owns(index):
                    total += (stop - start) * float(self.loss(samples.rows(start, stop), parameters))
            return number(total)

        (total,) = self.ranks.sums(summed, lambda: number(0.0))
        return float(total) / samples.count

    def _run(self, leaves: Sequence[Any], parameters: Mapping[str, Tensor]) -> Values:
        named = dict(zip((node.name for node in self.graph.inputs), leaves, strict=True))
        return self.program(named, parameters)


def _halved(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value


def _error(output: Tensor, target: Tensor) -> Tensor:
    error: Tensor = _MeanSquare.apply(output, target)  # type: ignore[no-untyped-call]
    return error


class _MeanSquare(torch.autograd.Function):
    """The mean squared error in three passes over memory. torch's takes seven, which would be most of a step."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor) -> Tensor:
        error = output - target
        ctx.save_for_backward(error)
        return square_sum(error) / error.numel()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (error,) = ctx.saved_tensors
        return error * (slope * (2 / error.numel())).to(error.dtype), None


def _weights(values: Values, nodes: list[Node], outputs: set[Node]) -> dict[str, float]:
    """The factor of each operation's mean squared error, by name."""
    inner = max(1, len(nodes) - len(outputs))
    return {
        node.name: (_OUTPUT_SHARE / len(outputs) if node in outputs else (1 - _OUTPUT_SHARE) / inner)
        / max(float(values[node.name].var()), _LEAST_VARIANCE)
        for node in nodes
        if values[node.name].is_floating_point() and values[node.name].numel()
    }


class _Gradient:
    """Adds the gradient of a loss, summed over ranks, to the `grad` of its variables.

    The pass is recorded and replayed on a GPU: launching the operations of a small network takes longer than running
    them.
    """

    def __init__(self, loss: Callable[[list[Any]], Tensor], variables: list[Tensor], ranks: Ranks = ALONE) -> None:
        self._variables, self._ranks = variables, ranks
        self._pass = ReplayedOn(
            lambda leaves: torch.autograd.grad(loss(leaves), variables, materialize_grads=True), variables[0].device
        )

    def add(self, batches: Iterable[list[Any] | None]) -> None:
        """For all of these inputs. None: this rank has no part of a batch, of which there are as many on all ranks."""
        totals = [torch.zeros_like(v) if v.grad is None else v.grad for v in self._variables]

        def add_own(leaves: list[Any] | None) -> None:
            if leaves is not None:
                for total, gradient in zip(totals, self._pass(leaves), strict=True):
                    total.add_(gradient)

        for leaves in batches:  # ranks read them together: none may leave before the others
            self._ranks.together(partial(add_own, leaves))
        sums = self._ranks.sums(lambda: totals, lambda: totals)
        for variable, total, summed in zip(self._variables, totals, sums, strict=True):
            if summed is not total:
                total.copy_(summed)
            variable.grad = total  # in the memory layout of the variable, as fused Adam needs it


def samples_at_once(graph: Graph, fitted: int, settings: DistillSettings, memory: Memory, device: torch.device) -> int:
    """How many samples go through the network at once, at most."""
    batch = min(settings.batch, fitted)
    return max(batch // _pieces(graph, batch, memory, device), min(_VARIANCE_SAMPLES, fitted))


def _pieces(graph: Graph, batch: int, memory: Memory, device: torch.device) -> int:
    """The number of pieces that a batch is cut into, such that a pass fits in memory, and ends within seconds."""
    sample_bytes = _COPIES * sum(int(node.meta["bytes"]) for node in graph.nodes)
    fitting = min(batch, math.ceil(batch * sample_bytes / memory.total))
    return max(fitting, math.ceil(batch / ending_soon(graph, device)))


def _views(leaves: list[Any], generator: torch.Generator) -> list[Any]:
    return [random_views(leaf, generator) if is_image(leaf) else leaf for leaf in leaves]


def _schedule(progress: float) -> float:
    """The share of the learning rate: a short linear rise, then half a cosine down to zero."""
    if progress < _WARM_UP:
        return progress / _WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (progress - _WARM_UP) / (1 - _WARM_UP)))
