"""What a process group of torch serves, and what it is given."""

from __future__ import annotations

import pytest
import torch

import snows
from snows.devices.distributed.group import carrier, own_gpu


@pytest.mark.parametrize(
    ("device", "backends", "sent_from"),
    [
        ("cpu", "cpu:gloo,cuda:gloo", "cpu"),
        ("cpu", "cpu:gloo,cuda:nccl", "cpu"),
        ("cuda", "cpu:gloo,cuda:nccl", "cuda"),
        ("cpu", "cuda:nccl", "cuda"),  # what init_process_group("nccl") gives, or on a machine with GPUs without a name
        ("cuda", "cuda:nccl", "cuda"),
        ("cuda", "cpu:gloo", "cpu"),  # what it gives without a name, without GPUs
    ],
)
def test_tensors_are_sent_from_a_device_that_the_group_serves(device: str, backends: str, sent_from: str) -> None:
    assert carrier(torch.device(device), backends) == torch.device(sent_from)


def test_each_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert own_gpu("cuda", 1, 2) == torch.device("cuda", 1)
    assert chosen == [1]
    with pytest.raises(snows.ArgumentError, match="there are 3 ranks on this host, and 2 GPUs; expected a GPU for eac"):
        own_gpu("cuda", 1, 3)
    with pytest.raises(snows.ArgumentError, match="device 'cuda:1' is one GPU, and there are several ranks"):
        own_gpu("cuda:1", 1, 2)
