"""Floating-point operations beside torch's own counter and beside the reductions that the paper reports."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import snows
from snows.data.embedded.resnet20 import ResNet20
from snows.data.preparation import prepare
from snows.graph import Graph
from snows.graph.flops import FlopCount, NetworkFlops, network_flops
from tests.libraries import library
from tests.networks import captured, example, make


def kept_of(graph: Graph, sparsity: float) -> dict[str, float]:
    """All layers pruned but the first, the classifier and 1x1 shortcuts."""
    return {y.parameter: 1 - sparsity for y in graph.layers[1:-1] if "downsample" not in y.name}


def pruned(graph: Graph, sparsity: float) -> FlopCount:
    return network_flops(graph).sparse(kept_of(graph, sparsity))


def graph_of(model: nn.Module, pixels: int) -> Graph:
    return prepare(model.eval(), torch.randn(2, 3, pixels, pixels), None, 0).graph


@pytest.mark.parametrize(("sparsity", "paper"), [(0.75, 3.80), (0.5, 1.97)])
def test_resnet20_as_in_the_paper(sparsity: float, paper: float) -> None:
    assert round(pruned(graph_of(ResNet20(), 32), sparsity).reduction, 2) == paper


@pytest.fixture
def networks(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The networks of the benchmarks."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    yield importlib.import_module("networks")
    del sys.modules["networks"]


def test_resnet50_of_its_shape_as_in_the_paper(networks: ModuleType) -> None:
    """Captured at 32 pixels, which is quick: a 224-pixel image has 49 times the positions in every convolution."""
    model = networks.ResNet50()
    for stage in (model.layer2, model.layer3, model.layer4):  # the stride where torchvision has it
        stage[0].conv1.stride, stage[0].conv2.stride = (1, 1), (2, 2)
    graph = graph_of(model, 32)
    small = network_flops(graph)
    layers = {name: flops if name == "fc.weight" else 49 * flops for name, flops in small.layers.items()}
    flops = NetworkFlops(sum(layers.values()), 0, layers)
    assert flops.total == pytest.approx(2 * 4.09e9, rel=0.001)
    for sparsity, paper in ((0.75, 2.99), (0.5, 1.79)):
        assert flops.sparse(kept_of(graph, sparsity)).reduction == pytest.approx(paper, rel=0.02)


def test_vit_b_of_its_shape_as_in_the_paper(networks: ModuleType) -> None:
    """Captured with one block, of which the network has twelve. The paper's 1.97 lies between the two counts."""
    graph = graph_of(networks.ViT(768, 1, 12), 224)
    one = network_flops(graph)
    layers = {name: 12 * flops if "blocks" in name else flops for name, flops in one.layers.items()}
    flops = NetworkFlops(sum(layers.values()) + 12 * one.attention, 12 * one.attention, layers)
    count = flops.sparse(kept_of(graph, 0.5))
    assert count.reduction_without_attention == pytest.approx(1.97, rel=0.02)
    assert count.reduction == pytest.approx(1.91, rel=0.002)  # 3 % less than the paper's


@pytest.mark.slow
def test_resnet50_as_in_the_paper() -> None:
    graph = graph_of(library("torchvision.models").resnet50(), 224)
    assert network_flops(graph).total == pytest.approx(2 * 4.09e9, rel=0.001)  # multiplications of torchvision's page
    assert pruned(graph, 0.75).reduction == pytest.approx(2.99, rel=0.02)
    assert round(pruned(graph, 0.5).reduction, 2) == 1.79


@pytest.mark.slow
def test_vit_b_as_in_the_paper() -> None:
    """The paper's 1.97 lies between the two counts."""
    count = pruned(graph_of(library("torchvision.models").vit_b_16(), 224), 0.5)
    assert count.reduction_without_attention == pytest.approx(1.97, rel=0.02)
    assert count.reduction == pytest.approx(1.91, rel=0.002)
    assert count.attention == 12 * 2 * (2 * 197 * 197 * 768)


@pytest.mark.parametrize("name", ["mlp", "conv-bn", "residual", "grouped", "depthwise", "conv1d", "conv3d"])
def test_the_total_is_that_of_torch(name: str) -> None:
    model, x = make(name), example(name, 1)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(x)
    flops = network_flops(captured(name)[1])
    assert flops.total == counter.get_total_flops() == sum(flops.layers.values())
    assert flops.attention == 0


def test_attention_multiplies_activations() -> None:
    flops = network_flops(captured("attention")[1])
    assert 0 < flops.attention == flops.total - sum(flops.layers.values())


def test_removed_weights_save_their_share() -> None:
    flops = NetworkFlops(total=100, attention=20, layers={"a": 40, "b": 40})
    count = flops.sparse({"a": 0.25})
    assert count == FlopCount(dense=100, sparse=70, attention=20)
    assert count.reduction == 100 / 70
    assert count.reduction_without_attention == 80 / 50
    assert count.to_dict()["reduction"] == count.reduction
    assert flops.sparse({}).reduction == 1


def test_a_network_without_products() -> None:
    assert FlopCount(0, 0, 0).reduction == FlopCount(0, 0, 0).reduction_without_attention == 1


def test_report_and_inspection_by_hand() -> None:
    """Positions x inputs x kernel x outputs multiplications each; only the middle layer is pruned by default."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 4 * 4, 10),
    ).eval()  # fmt: skip
    first, middle, last = 2 * 64 * 3 * 9 * 4, 2 * 16 * 4 * 9 * 8, 2 * 128 * 10
    expected = FlopCount(first + middle + last, first + middle // 4 + last, 0)
    x = torch.randn(8, 3, 8, 8)
    result = snows.prune(model, x, "1:4", solver=None, progress=False)
    assert result.report.flops == expected
    assert [layer.flops for layer in result.report.layers] == [middle]
    assert json.loads(result.report.to_json())["flops"] == expected.to_dict()
    found = snows.inspect(model, x, "1:4")
    assert found.flops == expected
    assert {layer.name: layer.flops for layer in found.layers} == {"0": first, "2": middle, "5": last}


def test_a_report_counts_the_masks_that_are_there() -> None:
    """An unstructured mask spreads as it likes: the report counts what each layer kept."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)).eval()
    result = snows.prune(model, torch.randn(16, 64), 0.5, layers="*", solver=None, progress=False)
    kept = {name: 2 * int(mask.sum()) for name, mask in result.masks.items()}
    assert result.report.flops == FlopCount(2 * (2048 + 512 + 128), sum(kept.values()), 0)
