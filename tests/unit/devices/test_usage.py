"""The memory that is used right now."""

from __future__ import annotations

import mmap

import pytest
import torch

from snows.devices.usage import memory_in_use


def test_every_gpu_counts_whichever_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that writes a log has a current device of its own."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=0: {0: 7, 1: 40}[device])
    assert memory_in_use() == 47


def test_without_a_gpu_it_is_host_memory() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("this process uses a GPU")
    before = memory_in_use()
    if before is None:
        pytest.skip("the system does not say")
    size = 64 << 20
    with mmap.mmap(-1, size) as held:  # always new pages; a tensor may be given those of one that was freed
        held[:] = bytes(size)
        assert memory_in_use() >= before + size // 2
