"""What a run is expected to take of the device's memory. The factors themselves were measured on a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from snows.devices.memory import Memory
from snows.graph import Graph, capture
from snows.patterns import PatternRules
from snows.plan import make_plan
from snows.recipe import DEFAULT
from snows.solve.estimate import Estimate
from snows.solve.footprint import linearized_bytes, micro_batch_size
from snows.solve.settings import resolve
from tests.networks import captured

GPU = torch.device("cuda")


def estimate(total: int = 1 << 40, samples: int = 1000, horizon: int = 4, graph: Graph | None = None) -> Estimate:
    graph = graph or captured("residual")[1]
    settings = resolve(DEFAULT.replace(horizon=horizon), graph, "cuda")
    plan = make_plan(graph, PatternRules.parse("2:4"), horizon)
    memory = Memory(total)
    size = micro_batch_size(graph, plan, samples, settings, GPU, memory)
    return Estimate(graph, plan, settings, memory, GPU, samples, size)


def test_more_samples_and_longer_horizons_take_more() -> None:
    assert estimate(samples=2000).peak() > estimate(samples=1000).peak() > estimate(samples=500).peak() > 0
    assert estimate(horizon=6).peak() > estimate(horizon=1).peak()


def test_the_peak_is_that_of_the_widest_layer() -> None:
    """Layers are solved one after another, so narrow ones add nothing. The widest holds a block for each output."""
    widths = [4, 8, 256, 16, 8, 2]
    parts = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    graph = capture(nn.Sequential(*parts).eval(), (torch.randn(8, 4),), {})
    found = estimate(samples=100, horizon=1, graph=graph)
    needs = {group[0].layer.name: found.of_group(group) for group in found.plan.groups}
    assert list(needs) == ["2", "4", "6"]
    assert found.peak() == needs["4"] < sum(needs.values())
    blocks = 4 * 16 * (256 // 2) ** 2  # float32, outputs, inputs that 2:4 keeps
    assert needs["4"] > blocks > max(needs["2"], needs["6"]) / 2
    assert replace(found, plan=replace(found.plan, pruned=())).peak() == 0


@pytest.mark.parametrize("horizon", [1, 6])
def test_within_a_budget_samples_do_not_count(horizon: int) -> None:
    """Activations are kept elsewhere, targets are computed again, and pieces are small."""
    total = 300_000
    few, many = (estimate(total, samples, horizon) for samples in (2_000, 200_000))
    assert few.micro_batch == many.micro_batch < 1000
    assert many.peak() <= total
    assert many.peak() == pytest.approx(few.peak(), rel=0.2)
    assert estimate(1 << 40, 200_000, horizon).peak() > 10 * total


def test_half_precision_takes_half() -> None:
    _, graph = captured("residual")
    cost = graph.segment([graph.layers[1]], 4).cost
    full, half = (linearized_bytes(cost, "gauss-newton", dtype) for dtype in (torch.float32, torch.bfloat16))
    assert full == 2 * half == cost.slope_bytes
    assert linearized_bytes(cost, "hessian", torch.float32) == 2 * cost.bytes > full
