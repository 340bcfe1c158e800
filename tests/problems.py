"""K-step problems of the tiny networks, in the middle of a run: every layer is already pruned."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snows.data.streams import Batches, Stream
from snows.devices.memory import Memory
from snows.graph import Graph, Layer, capture
from snows.recipe import Recipe
from snows.solve.layer import SolvedLayer, Turn, solve_layer
from snows.solve.objective import Objective
from snows.solve.problem import LayerProblem
from snows.solve.settings import Settings, resolve
from tests.networks import call_arguments, captured, example

SAMPLES = 5
CASE = ("residual", "conv2.weight")
PLENTY = Memory(1 << 40)
FIRST = Turn(seed=0, sweep=0, index=0)


def layer_of(name: str, parameter: str) -> Layer:
    return next(layer for layer in captured(name)[1].layers if layer.parameter == parameter)


@cache
def pruned_parameters(name: str) -> dict[str, Tensor]:
    """The parameters of a network in which every layer is already pruned and re-adjusted, as in a second sweep."""
    _, graph = captured(name)
    generator = torch.Generator().manual_seed(3)
    changed = dict(graph.parameters)
    for layer in [layer for layer in graph.layers if layer.refusal is None]:
        weight = changed[layer.parameter]
        noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        kept = torch.rand(weight.shape, generator=generator) < 0.7
        changed[layer.parameter] = (weight + 0.1 * noise) * kept
    return changed


def problem(
    name: str,
    parameter: str,
    horizon: int,
    split: tuple[int, ...] = (2, 3),
    targets_from: str = "dense-stream",
    keep_bytes: int = 1 << 30,
    held_out: int = 0,
) -> LayerProblem:
    """Of one layer. Samples come in micro-batches of these sizes, the last `held_out` of which are held out."""
    graph, layer = captured(name)[1], layer_of(name, parameter)
    leaves = torch.utils._pytree.tree_leaves(call_arguments(example(name, sum(split))))
    names = [node.name for node in graph.inputs]
    pieces = [dict(zip(names, part, strict=True)) for part in zip(*(leaf.split(split) for leaf in leaves), strict=True)]
    dense = Stream(graph, graph.parameters, Batches(pieces, split, held_out))
    pruned = Stream(graph, pruned_parameters(name), Batches(pieces, split, held_out))
    dense.advance(layer.position)
    pruned.advance(layer.position)
    return LayerProblem(graph.segment([layer], horizon), dense, pruned, targets_from, keep_bytes)


def weight_of(name: str, parameter: str) -> Tensor:
    """Where derivatives are taken. An output whose weights are all zero would lie on the kink of its rectifier."""
    return pruned_parameters(name)[parameter] + 0.02


def settings(name: str = "residual", **choices: Any) -> Settings:
    """Exact Newton steps from the masked weights, if nothing else is chosen."""
    exact = {"start": "masked", "preconditioner": None, "relative_damping": 0.0, "cg_relative_tolerance": 1e-12,
             "cg_least_gain": 0.0, "cg_steps": 500, "product_samples": None, "horizon": 3}  # fmt: skip
    return resolve(Recipe(**{**exact, **choices}), captured(name)[1])


def mask_of(shape: torch.Size, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6


def solve(
    given: LayerProblem, chosen: Settings, turn: Turn = FIRST, memory: Memory = PLENTY, seed: int = 0
) -> SolvedLayer:
    """With the weights of the pruned stream, which are zero at other places than the mask."""
    (layer,) = given.layers
    return solve_layer(
        given, given.pruned.parameters, {layer.parameter: mask_of(layer.shape, seed)}, chosen, memory, turn
    )


class Joint(nn.Module):
    """Query, key and value that read different inputs, which are computed between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        q = self.q(x)
        other = torch.sin(x)
        k, v = self.k(other), self.v(other)
        attended: Tensor = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.head(attended)


@cache
def joint_network() -> tuple[nn.Module, Graph]:
    """Layers that are solved together. Neither is to be changed."""
    torch.manual_seed(0)
    model = Joint().double().eval().requires_grad_(False)
    return model, capture(model, (torch.randn(2, 3, 4, dtype=torch.float64),), {})


def products_of(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], int]]:
    """The pieces and the number of samples of every system that is solved."""
    seen: list[tuple[tuple[int, ...], int]] = []
    product = Objective.product

    def watch(objective: Objective, *arguments: Any) -> Any:
        seen.append((objective.chosen, objective.samples))
        return product(objective, *arguments)

    monkeypatch.setattr(Objective, "product", watch)
    call()
    return seen


def joint_samples() -> Tensor:
    return torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def joint_problem() -> LayerProblem:
    """Of query, key and value of the dense network, with K=1."""
    graph = joint_network()[1]
    layers = [layer for layer in graph.layers if layer.name in "qkv"]
    batches = Batches([{graph.inputs[0].name: part} for part in joint_samples().split(3)], (3, 3))
    streams = [Stream(graph, graph.parameters, batches) for _ in range(2)]
    for stream in streams:
        stream.advance(layers[0].position)
    return LayerProblem(graph.segment(layers, 1), *streams, "dense-stream", 1 << 30)
