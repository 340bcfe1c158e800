"""Events as lines of JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import snows
from snows.events import CGStep, Event, LayerSolved, MemoryEstimated, RunFinished, RunStarted
from snows.listeners import EventsFile
from snows.results.report import fold
from tests.integration.conftest import strict_json
from tests.networks import example, make


def test_every_event_of_a_run_is_a_line(tmp_path: Path) -> None:
    seen: list[Event] = []
    path = tmp_path / "events.jsonl"
    recipe = snows.Recipe(horizon=1, sweeps=1, cg_steps=2, finish_steps=2)
    options = {"recipe": recipe, "progress": [seen.append, EventsFile(path)]}
    result = snows.prune(make("conv-bn"), example("conv-bn", 24), "2:4", **options)  # type: ignore[arg-type]
    lines = [strict_json(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == [type(event).__name__ for event in seen]
    assert {"RunStarted", "LayerStarted", "CGStep", "LayerSolved", "DistillStep", "RunFinished"} <= {
        line["event"] for line in lines
    }
    assert all(line["time"].startswith("20") for line in lines)
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    solved = [line for line in lines if line["event"] == "LayerSolved"]
    assert [line["solve"]["loss"] for line in solved] == [
        event.solve.loss for event in seen if isinstance(event, LayerSolved)
    ]
    assert lines[-1]["kept"] == {layer.parameter: layer.kept for layer in result.report.layers}
    assert fold(seen).layers == result.report.layers


def test_a_line_is_there_as_soon_as_the_event_happened_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    file = EventsFile(tmp_path / "events.jsonl")
    file(MemoryEstimated(7))
    assert json.loads(file.path.read_text())["peak_bytes"] == 7
    file(RunFinished({}, float("nan"), 0, None))
    assert strict_json(file.path.read_text().splitlines()[1])["seconds"] is None
    file.close()


def test_a_path_that_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(snows.InputError, match=r"cannot write to .*missing/events\.jsonl: No such file"):
        EventsFile(tmp_path / "missing" / "events.jsonl")


def test_a_fifo_is_written_to_if_somebody_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "events"
    os.mkfifo(path)
    with pytest.raises(snows.InputError, match=r"cannot write to .*events: it is a FIFO that nobody reads"):
        EventsFile(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        file = EventsFile(path)
        assert os.get_blocking(file._file.fileno())
        file(MemoryEstimated(7))
        assert json.loads(os.read(reader, 1000))["peak_bytes"] == 7
        file.close()
    finally:
        os.close(reader)


def test_a_failure_later_is_a_warning_and_the_work_goes_on(tmp_path: Path) -> None:
    file = EventsFile(tmp_path / "events.jsonl")
    file.close()
    with pytest.warns(snows.SnowsWarning, match="nothing more is written to .*events.jsonl") as warned:
        file(CGStep(1, 1, 1, 2))
    file(CGStep(1, 1, 2, 2))
    assert len(warned) == 1
    seen: list[Event] = []
    model, data = make("mlp"), example("mlp", 24)
    closed = EventsFile(tmp_path / "other.jsonl")
    closed.close()
    with pytest.warns(snows.SnowsWarning, match="nothing more is written"):
        snows.prune(model, data, 0.5, recipe=snows.Recipe(horizon=0, sweeps=1), progress=[seen.append, closed])
    assert any(isinstance(event, RunStarted) for event in seen)
    assert isinstance(seen[-1], RunFinished)
