"""A clock that gives time and peaks of memory to phases."""

from __future__ import annotations

import pytest
import torch

from snows.devices import phases as module
from snows.devices.phases import Phases, peak_memory


class World:
    """Time and memory that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time, self.peak = 0.0, 100
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.time)
        monkeypatch.setattr(module, "peak_memory", lambda device: self.peak)

    def passes(self, seconds: float, peak: int | None = None) -> None:
        self.time += seconds
        self.peak = peak or self.peak


def test_time_inside_another_phase_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    clock = Phases()
    world.passes(50)  # no phase
    for _ in range(2):
        with clock("outer"):
            world.passes(1)
            with clock("inner"):
                world.passes(10)
            world.passes(2)
    assert [(phase.name, phase.seconds) for phase in clock.found] == [("outer", 6), ("inner", 20)]


def test_a_peak_belongs_to_the_phase_that_raised_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    clock = Phases()
    with clock("low"):
        world.passes(1)
    with clock("outer"):
        world.passes(1, 200)
        with clock("inner"):
            world.passes(1, 500)
        world.passes(1)
    with clock("after"):
        world.passes(1)
    assert {phase.name: phase.peak_bytes for phase in clock.found} == {
        "low": None, "outer": 200, "inner": 500, "after": None,
    }  # fmt: skip


def test_a_phase_that_fails_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    clock = Phases()

    def fail() -> None:
        with clock("first"):
            world.passes(3)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    world.passes(4)
    assert [phase.seconds for phase in clock.found] == [3]


def test_the_memory_of_this_process() -> None:
    before = peak_memory(torch.device("cpu"))
    assert before is not None
    size = before + (64 << 20)
    held = torch.ones(size // 4)
    assert peak_memory(torch.device("cpu")) >= size
    del held
    clock = Phases()
    clock.watch(torch.device("cpu"))
    assert (clock.device_peak, clock.device_name) == (None, "cpu")
