"""How long calls take: warm, several times, in turns, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch

_WARM_CALLS = 3
_SHORTEST = 2e-3  # seconds of one measurement; quicker calls are repeated within it
_FEWEST, _MOST = 5, 50  # measurements


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of several measurements, and their quartiles."""

    median: float
    low: float
    high: float
    measurements: int

    def below(self, other: Timing) -> bool:
        """Whether this is faster beyond the spread of both."""
        return self.high < other.low


def time_in_turns(
    calls: Mapping[str, Callable[[], Any]], device: torch.device, seconds: float = 0.5
) -> dict[str, Timing]:
    """The timings of these calls, one measurement of each after the other. At least five of each, whatever it takes."""
    repeats = {name: _warm(call, device, seconds) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    for count in range(_MOST):
        if count >= _FEWEST and time.perf_counter() > end:
            break
        for name, call in calls.items():
            found[name].append(_measure(call, repeats[name], device))
    return {name: summary(values) for name, values in found.items()}


def summary(values: list[float]) -> Timing:
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Timing(median(values), low, high, len(values))


def _warm(call: Callable[[], Any], device: torch.device, seconds: float) -> int:
    """Call until kernels are chosen and memory is allocated. Returns how many calls make a measurement."""
    end = time.perf_counter() + seconds
    for count in range(_WARM_CALLS):
        if count and time.perf_counter() > end:  # one that takes so long is warm after the first call
            break
        call()
        _wait(device)
    return max(1, round(_SHORTEST / max(_measure(call, 1, device), 1e-7)))


def _measure(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    _wait(device)
    return (time.perf_counter() - began) / repeats


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
