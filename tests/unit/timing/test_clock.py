"""Timings: warm, in turns, with their spread."""

from __future__ import annotations

import time

import torch

from snows.timing.clock import Timing, summary, time_in_turns

CPU = torch.device("cpu")


def test_calls_are_warm_and_take_turns() -> None:
    order: list[str] = []

    def slow(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(seconds)

    found = time_in_turns({"a": lambda: slow("a", 0.004), "b": lambda: slow("b", 0.012)}, CPU, seconds=0.1)
    count = found["a"].measurements
    assert count == found["b"].measurements >= 5
    assert order[:8] == ["a"] * 4 + ["b"] * 4  # three warm calls, and one that says how often to repeat
    assert order[8:] == ["a", "b"] * count
    assert 0.004 <= found["a"].low <= found["a"].median <= found["a"].high
    assert found["b"].median >= 0.012


def test_quick_calls_are_repeated_within_a_measurement() -> None:
    count = 0

    def quick() -> None:
        nonlocal count
        count += 1

    found = time_in_turns({"quick": quick}, CPU, seconds=0.0)
    assert count > 5 * 1000
    assert found["quick"].median < 1e-4


def test_long_calls_are_made_a_few_times_only() -> None:
    count = 0

    def long() -> None:
        nonlocal count
        count += 1
        time.sleep(0.01)

    assert time_in_turns({"long": long}, CPU, seconds=0.0)["long"].measurements == 5
    assert count == 7  # one warm call, one that says how often to repeat, five measurements


def test_median_and_quartiles() -> None:
    assert summary([5.0, 1.0, 2.0, 4.0, 3.0]) == Timing(3.0, 2.0, 4.0, 5)


def test_faster_is_faster_beyond_both_spreads() -> None:
    assert Timing(1.0, 0.9, 1.1, 5).below(Timing(1.3, 1.2, 1.4, 5))
    assert not Timing(1.0, 0.9, 1.25, 5).below(Timing(1.3, 1.2, 1.4, 5))
