"""What a run is expected to take of the device's memory. The factors themselves were measured on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import snows
from snows.devices.memory import Memory
from snows.patterns.base import PatternRules
from snows.plan import make_plan
from snows.recipe import DEFAULT
from snows.solve.estimate import Estimate
from snows.solve.footprint import linearized_bytes, micro_batch_size
from snows.solve.settings import resolve
from tests.networks import captured, example, make

GPU = torch.device("cuda")


def estimate(total: int = 1 << 40, samples: int = 1000, horizon: int = 4, name: str = "residual") -> Estimate:
    _, graph = captured(name)
    settings = resolve(DEFAULT.replace(horizon=horizon), graph, "cuda")
    plan = make_plan(graph, PatternRules.parse("2:4"), horizon)
    memory = Memory(total)
    size = micro_batch_size(graph, plan, samples, settings, GPU, memory)
    return Estimate(graph, plan, settings, memory, GPU, samples, size)


def test_more_samples_and_longer_horizons_take_more() -> None:
    assert estimate(samples=2000).peak() > estimate(samples=1000).peak() > estimate(samples=500).peak() > 0
    assert estimate(horizon=6).peak() > estimate(horizon=1).peak()


def test_the_whole_is_the_largest_layer() -> None:
    found = estimate()
    assert found.peak() == max(found.of_group(group) for group in found.plan.groups)
    assert replace(found, plan=replace(found.plan, pruned=())).peak() == 0


@pytest.mark.parametrize("horizon", [1, 6])
def test_within_a_budget_samples_do_not_count(horizon: int) -> None:
    """Activations rest elsewhere, targets are computed again, and pieces are small."""
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


def test_it_is_said_before_the_run_on_devices_with_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU there is nothing to compare it with."""
    said: list[str] = []
    monkeypatch.setattr("snows.listeners.progress.ProgressBar.say", lambda self, words: said.append(words))
    result = snows.prune(make("mlp"), example("mlp", 40), "2:4", recipe=snows.Recipe(horizon=1), progress=True)
    assert said == []
    assert result.report.expected_memory_bytes is None


def test_inspection_within_a_budget() -> None:
    whole = snows.inspect(make("residual"), example("residual", 40), "2:4", samples=100_000)
    within = snows.inspect(make("residual"), example("residual", 40), "2:4", samples=100_000, memory="2MB")
    assert within.memory_bytes < whole.memory_bytes
    with pytest.raises(snows.ArgumentError, match="expected a size"):
        snows.inspect(make("residual"), example("residual", 40), "2:4", memory="much")
