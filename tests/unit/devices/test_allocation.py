"""What glibc is told, and that nothing else is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from snows.devices import allocation


@pytest.mark.parametrize("accepted", [1, 0])
def test_freed_memory_is_kept(accepted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    def mallopt(option: int, value: int) -> int:
        calls.append((option, value))
        return accepted

    monkeypatch.setattr(allocation.sys, "platform", "linux")
    monkeypatch.setattr(allocation.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    allocation.keep_freed_memory()
    smaller = [] if accepted else [(-3, 32 << 20)]  # some versions refuse a large threshold
    assert calls == [(-1, 1 << 30), (-2, 64 << 20), (-3, 1 << 30), *smaller]


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: None) -> None:
        raise OSError("no C library")

    monkeypatch.setattr(allocation.ctypes, "CDLL", lambda name: SimpleNamespace())  # musl has no mallopt
    allocation.keep_freed_memory()
    monkeypatch.setattr(allocation.ctypes, "CDLL", fail)
    allocation.keep_freed_memory()
    monkeypatch.setattr(allocation.sys, "platform", "darwin")
    allocation.keep_freed_memory()
