"""A function's launches, recorded and replayed where there is a GPU, do what its calls do."""

from __future__ import annotations

import pytest
import torch

from snows.devices.cuda_graph import Replayed

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
