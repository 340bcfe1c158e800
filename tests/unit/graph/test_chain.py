"""Chains of linear maps against forward- and reverse-mode derivatives of the eager model, in float64."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp

from snows.graph import Graph, capture
from snows.graph.chain import Chain, Step
from tests.networks import NETWORKS, call_arguments, captured, example

LINKS: dict[str, Callable[[Tensor], Tensor]] = {  # what comes between a convolution and the output
    "relu": torch.relu,
    "two factors in a row": lambda x: torch.relu(3 * x),
    "a factor that is read twice": lambda x: (y := 3 * x) + torch.relu(y),
    "a value with itself": lambda x: x * x + (x + x),
    "a fixed tensor": lambda x: x * torch.arange(1.0, 5.0, dtype=x.dtype)[:, None, None] + 1,
    "a number in front": lambda x: 2.5 * x - x / 3,
    "broadcast": lambda x: x + x.mean((2, 3), keepdim=True) * x[:, :1],
    "added with a factor": lambda x: torch.add(x, x.flip(1), alpha=0.5),
    "split": lambda x: torch.cat([part * (i + 1) for i, part in enumerate(x.split(2, 1))], 1),
    "chunks, one unread": lambda x: x.chunk(2, 1)[1],
    "with something fixed": lambda x: torch.cat([x, torch.ones_like(x)], 1),
    "shapes": lambda x: x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, 2).transpose(1, 2).flatten(1),
    "pools": lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2) + F.adaptive_avg_pool2d(x, 2),
    "pad and upsample": lambda x: F.interpolate(F.pad(x, (1, 0, 0, 1)), scale_factor=2.0),
    "smooth": lambda x: F.silu(x) + F.gelu(x) * torch.sigmoid(x) + F.hardswish(x) + F.elu(x),
    "pieces": lambda x: F.relu6(4 * x) + F.hardtanh(x) + F.leaky_relu(x, 0.2) + x.clamp(-0.3, 0.4),
    "gated": lambda x: F.glu(x, 1),
    "norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "softmax": lambda x: F.softmax(x.flatten(2), -1) @ x.flatten(2).mT,
    "linear": lambda x: F.linear(x, torch.arange(12.0, dtype=x.dtype).view(3, 4) / 12),
    "a comparison": lambda x: torch.where(x > 0, x, x.square()),
}


class Link(nn.Module):
    def __init__(self, link: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.link = link

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.link(self.norm(self.conv(x))))


def linearized(graph: Graph, x: Any, parameter: str, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Chain]:
    """The whole network's outputs, as they vary with one parameter."""
    layer = next(layer for layer in graph.layers if layer.parameter == parameter)
    values = dict(zip((node.name for node in graph.inputs), torch.utils._pytree.tree_leaves(x), strict=True))
    segment = graph.segment([layer], 1000)
    values |= graph.program(0, layer.position)(values, graph.parameters)
    values |= segment.prelude(values, graph.parameters)
    return segment.body.linearize(values, graph.parameters, [parameter], dtype)


@pytest.mark.parametrize("name", LINKS)
def test_every_kind_of_node(name: str) -> None:
    torch.manual_seed(0)
    model = Link(LINKS[name]).double().eval()
    x, weight = torch.randn(3, 2, 4, 4, dtype=torch.float64), model.conv.weight.detach()
    graph = capture(model, (x,), {})
    outputs, chain = linearized(graph, x, "conv.weight")
    silent = [0.0] * (len(outputs) - 1)  # factors of the operations before the last

    def forward(w: Tensor) -> Tensor:
        result: Tensor = functional_call(model, {"conv.weight": w}, (x,))
        return result

    v = torch.randn_like(weight)
    expected, tangent = jvp(forward, (weight,), (v,))
    torch.testing.assert_close(outputs[-1], expected)
    torch.testing.assert_close(chain.push([v])[-1], tangent)
    u = torch.randn_like(expected)
    (pulled,) = chain.pull([*outputs[:-1], u], [*silent, 0.7])
    torch.testing.assert_close(pulled, vjp(forward, weight)[1](0.7 * u)[0])


def test_factors_in_a_row_are_one() -> None:
    """Batch norm and ReLU behind a convolution: one step for both."""
    _, graph = captured("residual")
    _, chain = linearized(graph, example("residual", 3), "conv1.weight")
    names = [step.name for step in chain._steps]
    assert not any("addcmul" in name for name in names[:2])
    assert sum("relu" in name for name in names) == sum("relu" in node.name for node in graph.nodes) - 1


def tensors_of(step: Step) -> dict[int, Tensor]:
    """What a step's functions hold, by address."""
    found: dict[int, Tensor] = {}
    waiting: list[Any] = [step.push, step.pull]
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found[item.untyped_storage().data_ptr()] = item
        elif isinstance(item, tuple | list):
            waiting.extend(item)
        elif callable(item) and getattr(item, "__closure__", None):
            waiting.extend(cell.cell_contents for cell in item.__closure__)
    return found


@pytest.mark.parametrize("name", ["mlp", "conv-bn", "residual", "grouped", "depthwise", "conv1d", "conv3d"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_maps_hold_what_the_plan_says(name: str, dtype: torch.dtype) -> None:
    """And not the values they were taken at: slopes of activations and the layer's inputs, besides weights."""
    samples = 17  # a size that no weight has
    _, graph = captured(name)
    inputs = call_arguments(example(name, samples))
    for layer in graph.layers[:2]:
        held: dict[int, Tensor] = {}
        _, chain = linearized(graph, inputs, layer.parameter, dtype)
        gc.collect()
        for step in chain._steps:
            held |= {address: t for address, t in tensors_of(step).items() if t.ndim and samples in t.shape}
        cost = graph.segment([layer], 1000).cost
        size = sum(t.untyped_storage().nbytes() for t in held.values()) * 8 / dtype.itemsize
        if name == "conv-bn":  # its pooling is differentiated by autograd, in full precision
            assert size * dtype.itemsize / 8 <= 1.01 * samples * cost.slope_bytes
        else:
            assert size == pytest.approx(samples * cost.slope_bytes, rel=0.01)


@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_decided_once_and_done_for_any_number_of_samples(name: str) -> None:
    _, graph = captured(name)
    layer = next(layer for layer in graph.layers if layer.refusal is None)
    program = graph.segment([layer], 1000).body
    for samples in (2, 5):
        linearized(graph, call_arguments(example(name, samples)), layer.parameter)
    assert len(program._linearizations) == 1
