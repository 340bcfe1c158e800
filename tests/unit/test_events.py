"""The events of a run."""

from __future__ import annotations

import snows
from snows.events import CGStep, Event, LayerSolved, LayerStarted, TimeEstimated
from snows.words import duration
from tests.networks import example, make


def test_steps_of_conjugate_gradients_are_events_of_their_layer() -> None:
    events: list[Event] = []
    recipe = snows.Recipe(horizon=1, sweeps=2, cg_steps=3)
    snows.prune(make("conv-bn"), example("conv-bn", 24), "2:4", recipe=recipe, progress=events.append)
    solved = [event.solve for event in events if isinstance(event, LayerSolved)]
    steps = [event for event in events if isinstance(event, CGStep)]
    assert len(steps) == sum(solve.cg_steps for solve in solved) > 0
    assert all(1 <= event.step <= event.steps and event.newton_step <= event.newton_steps for event in steps)
    assert isinstance(events[events.index(steps[0]) - 1], LayerStarted)


def test_durations_in_words() -> None:
    words = {1.0: "a second", 40.4: "40 seconds", 100.0: "2 minutes", 5000.0: "83 minutes", 9000.0: "2.5 hours"}
    assert {seconds: duration(seconds) for seconds in words} == words
    estimate = TimeEstimated((600.0, 1200.0, 600.0, 1200.0), last_stage=60, quicker=("effort='fast'", "fewer samples"))
    assert estimate.seconds == 3660
    assert str(estimate) == "this will take about 61 minutes; quicker: effort='fast', fewer samples"
