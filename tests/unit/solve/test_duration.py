"""How long a run will take, before it is run."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import snows
from snows.data import embedded
from snows.events import Event, LayerSolved, RunFinished, TimeEstimated
from snows.solve import duration
from tests.networks import example, make


def estimate_and_seconds(
    model: nn.Module, data: torch.Tensor, recipe: snows.Recipe, monkeypatch: pytest.MonkeyPatch
) -> tuple[TimeEstimated, float]:
    """The estimate of a run, and how long it took from there on."""
    monkeypatch.setattr(duration, "_SHORT", 0.0)
    events: list[tuple[Event, float]] = []
    snows.prune(model, data, "2:4", recipe=recipe, progress=lambda event: events.append((event, time.monotonic())))
    ((estimate, began),) = [(event, at) for event, at in events if isinstance(event, TimeEstimated)]
    (ended,) = [at for event, at in events if isinstance(event, RunFinished)]
    assert len(estimate.layers) == sum(isinstance(event, LayerSolved) for event, _ in events)
    return estimate, ended - began


def test_the_estimate_has_the_size_of_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generous: other work may take the machine while it is measured, or later."""
    recipe = snows.Recipe(horizon=6, sweeps=2, mask_steps=1, cg_steps=3, finish_steps=0)
    estimate, seconds = estimate_and_seconds(embedded.model(), embedded.images()[0][:100], recipe, monkeypatch)
    assert 0.2 < estimate.seconds / seconds < 5


def test_what_would_be_quicker_is_said_of_long_runs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = snows.Recipe(horizon=1, sweeps=1, cg_steps=2, finish_steps=2)
    model, data = make("conv-bn"), example("conv-bn", 300)
    estimate, _ = estimate_and_seconds(model, data, recipe, monkeypatch)
    assert estimate.quicker == ()
    assert estimate.last_stage > 0
    monkeypatch.setattr(duration, "_LONG", 0.0)
    estimate, _ = estimate_and_seconds(model, data, recipe, monkeypatch)
    assert estimate.quicker[:3] == ("effort 'fast'", "fewer than 300 samples", "horizon 0")


def test_short_runs_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(duration, "measured_speed", refuse)
    events: list[Event] = []
    snows.prune(make("mlp"), example("mlp", 100), 0.5, recipe=snows.Recipe(horizon=0, sweeps=1), progress=events.append)
    assert not any(isinstance(event, TimeEstimated) for event in events)
