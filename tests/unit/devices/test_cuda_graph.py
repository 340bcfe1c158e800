"""A function's launches, recorded and replayed where there is a GPU, do what its calls do."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from snows.devices.cuda_graph import Replayed, ReplayedOn, recorded

each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@each_device
def test_every_call_works_on_what_the_one_before_left(device: str) -> None:
    total, calls = torch.zeros(3, device=device), []

    def add() -> torch.Tensor:
        calls.append(None)
        total.add_(torch.arange(3, device=device))
        return 2 * total

    replayed = Replayed(add, total.device)
    doubled = [replayed().tolist() for _ in range(6)]
    assert doubled == [[0.0, 2.0 * i, 4.0 * i] for i in range(1, 7)]
    assert total.tolist() == [0.0, 6.0, 12.0]
    assert len(calls) == (6 if device == "cpu" else 3)  # two as they are, one to record


@each_device
def test_what_asks_the_device_for_a_value_is_called_each_time(device: str) -> None:
    total, seen = torch.zeros(1, device=device), []

    def add() -> None:
        total.add_(1)
        seen.append(int(total))  # waits for the device, which no recording can

    replayed = Replayed(add, total.device)
    for _ in range(5):
        replayed()
    assert seen == [1, 2, 3, 4, 5]
    torch.testing.assert_close(total.cpu(), torch.tensor([5.0]))


@each_device
def test_a_function_of_inputs_sees_those_of_each_call(device: str) -> None:
    """Inputs of another form than the first ones, too; those of the first form are not changed."""
    calls = []

    def scaled(inputs: Any) -> torch.Tensor:
        calls.append(None)
        (x,), options = inputs
        return options["factor"] * x["x"]

    replayed = ReplayedOn(scaled, torch.device(device))
    given = [((size, factor), torch.rand(size, device=device)) for size, factor in [(3, 2), (3, 2), (4, 2), (3, 5)] * 4]
    for (_, factor), x in given:
        before = x.clone()
        assert torch.equal(replayed((({"x": x},), {"factor": factor})), factor * before)
        assert torch.equal(x, before)
    recorded = 0 if device == "cpu" else 8 - 3  # of eight calls of the first form: two as they are, one to record
    assert len(calls) == len(given) - recorded


def test_what_was_replayed_is_freed_without_the_garbage_collector() -> None:
    x = torch.zeros(3)
    replayed = ReplayedOn(lambda inputs: inputs[0] + 1, x.device)
    replayed([x])
    own = weakref.ref(replayed)
    gc.disable()
    try:
        del replayed
        assert own() is None
    finally:
        gc.enable()


def test_each_recording_has_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[object] = []

    @contextmanager
    def graph(recording: object, stream: object = None) -> Iterator[None]:
        streams.append(stream)
        yield

    fakes = {"graph": graph, "CUDAGraph": object, "Stream": object, "current_stream": object}
    for name, fake in {**fakes, "stream": lambda stream: nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    assert [recorded(lambda: 3)[1] for _ in range(2)] == [3, 3]
    assert None not in streams
    assert len(set(streams)) == 2


@pytest.mark.gpu
def test_recordings_do_not_use_the_stream_that_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the device that was current when anybody first recorded something."""
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", "of another device")
    total, calls = torch.zeros(1, device="cuda"), []
    replayed = Replayed(lambda: calls.append(None) or total.add_(1), total.device)
    for _ in range(4):
        replayed()
    assert (float(total), len(calls)) == (4.0, 3)


@pytest.mark.gpu
def test_the_current_stream_is_as_before_where_nothing_can_be_recorded() -> None:
    total = torch.zeros(1, device="cuda")
    before = torch.cuda.current_stream()
    replayed = Replayed(lambda: int(total), total.device)
    for _ in range(3):
        replayed()
    assert torch.cuda.current_stream() == before
