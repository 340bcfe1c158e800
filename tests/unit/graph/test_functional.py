"""Capture of plain networks: nodes replaced one by one give what a second trace gives."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from snows.graph import capture
from snows.graph.functional import made_functional, replace_nodes
from snows.graph.operators import operator_of, out_of_place
from tests.networks import NETWORKS, call_arguments, example, make


class InPlaceOnView(nn.Module):
    """What is changed is a part of something else that is read later."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 1)
        self.head = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x[:, :2].relu_()
        return self.head(x)


class ChangedAfterReading(InPlaceOnView):
    """The value before and the one after the change are both read."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        y = x * 2
        x.relu_()
        x += 1
        return self.head(x + y)


class ViewedBeforeChange(InPlaceOnView):
    """A view from before the change shows it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        flat = x.flatten(2)
        x.relu_()
        return self.head(x) + flat.mean(-1)[:, :, None, None]


class OwnStatistics(nn.Module):
    """A batch norm that has no running statistics, beside one without weights."""

    def __init__(self, tracks: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 1)
        self.norm = nn.BatchNorm2d(4, track_running_stats=tracks, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


def _computes(node: Node) -> bool:
    return isinstance(node.meta["val"], Tensor) and not operator_of(node).shape_only


@pytest.mark.parametrize("name", [*NETWORKS, "changed after reading", "no affine"])
def test_plain_networks_need_no_second_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing nodes gives the operations that torch's own decomposition gives; shapes may be spelled otherwise."""
    if name in NETWORKS:
        model, inputs = make(name), example(name, 4)
    else:
        model = (ChangedAfterReading() if name == "changed after reading" else OwnStatistics(True)).double().eval()
        inputs = torch.randn(4, 2, 3, 3, dtype=torch.float64)
    fast = capture(model, *call_arguments(inputs))
    traced = []
    monkeypatch.setattr(
        sys.modules["snows.graph.functional"], "replace_nodes", lambda exported: traced.append(exported)
    )
    slow = capture(model, *call_arguments(inputs))
    assert traced
    for graph in (fast, slow):
        assert not any(out_of_place(node) for node in graph.nodes)
    found, expected = (
        [(str(n.target), n.meta["bytes"], n.meta["flops"]) for n in graph.nodes if _computes(n)]
        for graph in (fast, slow)
    )
    assert found == expected
    assert [layer.parameter for layer in fast.layers] == [layer.parameter for layer in slow.layers]
    leaves = torch.utils._pytree.tree_leaves(call_arguments(inputs))
    for a, b in zip(fast.run(leaves), slow.run(leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("make_model", [InPlaceOnView, ViewedBeforeChange, lambda: OwnStatistics(False)])
def test_networks_that_are_not_plain_are_left_to_torch(make_model: Any) -> None:
    model = make_model().eval()
    x = torch.randn(4, 2, 3, 3)
    exported = torch.export.export(model, (x,), strict=False)
    before = str(exported.graph)
    assert not replace_nodes(exported)
    assert str(exported.graph) == before


PLAIN = ["mlp", "conv-bn", "residual", "grouped", "depthwise", "conv1d", "conv3d", "shared-relu", "two-outputs"]


@pytest.mark.parametrize("name", PLAIN)
def test_common_networks_are_not_traced_again(name: str) -> None:
    exported = torch.export.export(make(name), *call_arguments(example(name, 4)), strict=False)
    assert replace_nodes(exported)
    called = [node for node in exported.graph.nodes if node.op == "call_function"]
    assert not any(out_of_place(node) or "batch_norm" in str(node.target) for node in called)
    torch.testing.assert_close(exported.module()(example(name, 4)), make(name)(example(name, 4)))


class Decomposed(nn.Module):
    """Operations that torch has to decompose."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.hardsigmoid(8 * self.norm(self.conv(x))))


def test_operations_without_second_derivatives_are_decomposed() -> None:
    model = Decomposed().double().eval()
    x = torch.randn(5, 2, 3, 3, dtype=torch.float64)
    exported = torch.export.export(model, (x,), strict=False)
    assert not replace_nodes(exported)
    with torch.no_grad():
        made = made_functional(exported)
    names = {str(node.target) for node in made.graph.nodes if node.op == "call_function"}
    assert {"aten.addcmul.default", "aten.clamp.default"} <= names
    assert not any("hardsigmoid" in name or "batch_norm" in name for name in names)
    expected = model(x)
    torch.testing.assert_close(made.module()(x), expected)
    torch.testing.assert_close(capture(model, (x,), {}).run([x])[0], expected)
