"""When the work will end."""

from __future__ import annotations

import re

import pytest

from snows.events import (
    CGStep,
    DistillStep,
    EpochEnded,
    LayerSolved,
    LayerStarted,
    SolveReport,
    TimeEstimated,
    TrainingStep,
    Working,
)
from snows.listeners.timeline import Timeline

SOLVE = SolveReport(1, 2.0, 1.0, 0.5, "closed form", "converged", 1, 5, 0, "gauss-newton", 1e-6, 0.1)


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


class Run:
    """A timeline whose clock the test moves."""

    def __init__(self, total: int | None = None, completed: int = 0) -> None:
        self.clock = Clock()
        self.timeline = Timeline("starting", total, completed, self.clock)

    def solve(
        self, index: int, total: int, seconds: float, sweep: int = 0, sweeps: int = 1, recalled: bool = False
    ) -> None:
        self.timeline(LayerStarted(("fc",), index, total, sweep, sweeps))
        self.clock.time += seconds
        self.timeline(LayerSolved(("fc",), index, total, sweep, sweeps, SOLVE, recalled))


def test_work_that_is_counted_by_hand() -> None:
    run = Run(total=10, completed=4)
    assert run.timeline.remaining is None
    assert run.timeline.end() == ""
    run.clock.time += 60
    run.timeline.advance()
    assert run.timeline.remaining == pytest.approx(300)  # the first four were done before
    assert re.fullmatch(r"ends about \d\d:\d\d, in 5 minutes", run.timeline.end())


def test_without_an_estimate_layers_count_the_same() -> None:
    run = Run()
    run.timeline(LayerStarted(("fc",), 0, 4, 0, 2))
    assert run.timeline.remaining is None
    run.solve(0, 4, 10, sweeps=2)
    assert run.timeline.remaining == pytest.approx(70)
    run.timeline(LayerStarted(("fc",), 1, 4, 0, 2))
    run.clock.time += 4
    assert run.timeline.remaining == pytest.approx(66)
    run.clock.time += 400  # a layer that takes longer than was thought
    assert run.timeline.remaining == pytest.approx(60)


def test_an_estimate_weighs_layers_and_bows_to_what_is_measured() -> None:
    run = Run()
    run.timeline(TimeEstimated((10.0, 90.0, 10.0, 90.0), last_stage=100.0))
    run.timeline(LayerStarted(("fc",), 0, 2, 0, 2))
    assert run.timeline.remaining == pytest.approx(300)
    run.solve(0, 2, 30, sweeps=2)  # three times as long
    pace = (0.1 * 200 + 30) / (0.1 * 200 + 10)
    assert run.timeline.remaining == pytest.approx(pace * 290)
    run.solve(1, 2, 270, sweeps=2)
    assert 2.5 * 200 < (run.timeline.remaining or 0) < 3 * 200


def test_layers_of_an_earlier_call_say_nothing_of_the_pace() -> None:
    run = Run()
    for index in range(3):
        run.solve(index, 6, 0.01, recalled=True)
    assert run.timeline.remaining is None
    run.solve(3, 6, 10)
    assert run.timeline.remaining == pytest.approx(20)
    assert (run.timeline.completed, run.timeline.total) == (4, 6)


def test_the_last_stage_has_a_pace_of_its_own() -> None:
    run = Run()
    run.solve(0, 1, 1000)
    run.clock.time += 2
    run.timeline(DistillStep(1, 50))
    assert run.timeline.remaining == pytest.approx(98)
    assert run.timeline.description == "last stage, all layers together"


def test_steps_inside_a_layer_are_a_detail_of_it() -> None:
    run = Run()
    run.timeline(LayerStarted(("fc",), 0, 2, 0, 1))
    run.timeline(CGStep(2, 5, 3, 10))
    assert (run.timeline.description, run.timeline.detail) == ("sweep 1/1  fc", "Newton 2/5, CG 3")
    run.timeline(LayerStarted(("fd",), 1, 2, 0, 1))
    assert run.timeline.detail == ""


def test_the_end_is_not_known_until_the_number_of_training_steps_is() -> None:
    run = Run()
    run.timeline(EpochEnded(0, 3, 0.0, 1.0, {"top1": 0.5}))
    for step in range(1, 11):
        run.clock.time += 2
        run.timeline(TrainingStep(step, None, 1, 3))
        assert (run.timeline.completed, run.timeline.total, run.timeline.remaining) == (step, None, None)
    run.timeline(EpochEnded(1, 3, 0.1, 1.0, {"top1": 0.625}))
    assert run.timeline.description == "epoch 1/3: top1 0.6250 on held-out samples"
    run.clock.time += 2
    run.timeline(TrainingStep(11, 30, 2, 3, {"top1": 0.625}))
    assert run.timeline.remaining == pytest.approx(2 * 19)


def test_steps_of_an_earlier_call_say_nothing_of_the_pace_of_training() -> None:
    run = Run()
    run.timeline(EpochEnded(2, 3, 0.1, 1.0, {}, recalled=True))
    run.clock.time += 5
    run.timeline(TrainingStep(21, 30, 3, 3))
    assert run.timeline.remaining == pytest.approx(5 * 9)


def test_pieces_of_other_work() -> None:
    run = Run()
    run.clock.time += 100  # of preparation
    run.timeline(Working("dense", 4, 10))
    assert (run.timeline.remaining, run.timeline.completed, run.timeline.total) == (None, 4, 10)
    run.clock.time += 30
    run.timeline(Working("wanda", 5, 10))
    assert run.timeline.remaining == pytest.approx(30 * 5)
    run.clock.time += 6
    run.timeline(Working("wanda", 5, 10, "sweep 1/1  fc"))
    assert (run.timeline.description, run.timeline.detail) == ("wanda", "sweep 1/1  fc")
