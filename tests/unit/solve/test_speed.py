"""A short measurement of this machine."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from snows.solve import speed
from snows.solve.speed import assumed_speed, measured_speed
from tests.networks import captured, example

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["residual", "attention", "depthwise"])
def test_every_operation_and_every_layer_is_timed(name: str) -> None:
    _, graph = captured(name)
    data = example(name, 32)
    asked: list[int] = []

    def samples(count: int) -> list[torch.Tensor]:
        asked.append(count)
        return [data[:count]]

    began = time.perf_counter()
    found = measured_speed(graph, graph.layers, samples, 32, CPU)
    whole = time.perf_counter() - began
    assert found.nodes.keys() == {node.name for node in graph.nodes}
    assert found.moments.keys() == {layer.parameter for layer in graph.layers}
    assert min(*found.nodes.values(), *found.moments.values(), found.products, found.factors) > 0
    assert found.of(graph.nodes) == pytest.approx(sum(found.nodes.values()))
    assert max(asked) <= 32
    assert found.of(graph.nodes) * max(asked) < whole


def test_slow_networks_are_timed_on_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_SECONDS", 0.0)
    _, graph = captured("residual")
    asked: list[int] = []
    measured_speed(graph, [], lambda count: asked.append(count) or [example("residual", count)], 32, CPU)  # type: ignore[func-returns-value]
    assert set(asked) == {2}


def test_a_moment_in_which_the_machine_is_busy_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every operation the quickest pass counts, also if another operation was slow in it."""
    _, graph = captured("residual")
    paces = iter([9.0, 30.0, 2.0, 3.0])  # of the passes; the first chooses kernels

    def timed(
        graph: Any, pruned: Any, inputs: Any, count: int, device: Any
    ) -> tuple[dict[str, float], dict[str, float]]:
        pace = next(paces)
        times = {node.name: (6 / pace if number == 0 else pace) for number, node in enumerate(graph.nodes)}
        return times, {layer.parameter: pace for layer in graph.layers}

    monkeypatch.setattr(speed, "_timed_pass", timed)
    found = measured_speed(graph, graph.layers, lambda count: [example("residual", count)], 32, CPU)
    first, *others = found.nodes.values()
    assert first == 0.2
    assert set(others) == set(found.moments.values()) == {2.0}


def test_an_assumed_speed_is_work_by_rate() -> None:
    _, graph = captured("residual")
    found = assumed_speed(graph, graph.layers, 10.0)
    assert found.of(graph.nodes) == pytest.approx(sum(node.meta["flops"] for node in graph.nodes) / 10)
    assert found.products == found.factors == 10
