"""Tensors on disk: the same values in the same layout, no file left behind, and a full disk."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import snows
from snows.devices import offload as disk
from snows.devices.offload import on_disk

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.randn(64, 8, 6, 6),
    "channels last": lambda: torch.randn(64, 8, 6, 6).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(90, 80).T,
    "a part": lambda: torch.randn(200, 80)[10:150:2, 3:],
    "expanded": lambda: torch.randn(80, 1).expand(80, 90),
    "double": lambda: torch.randn(70, 80, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(70, 80).bfloat16(),
    "whole numbers": lambda: torch.randint(-9, 9, (70, 80)),
    "bool": lambda: torch.rand(100, 80) < 0.5,
    "complex": lambda: torch.randn(70, 80, dtype=torch.complex64),
    "one number": lambda: torch.tensor(3.5),
    "empty": lambda: torch.zeros(0, 4),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_come_back_as_they_were(name: str, folder: Path) -> None:
    value = LAYOUTS[name]()
    found = on_disk(value)
    assert found.dtype == value.dtype
    assert torch.equal(found, value)
    assert found.stride() == torch.empty_like(value).stride()  # as of any copy
    assert not list(folder.iterdir())
    if value.numel() > 4000:
        assert torch.equal(found + found, value + value)


def test_the_file_is_what_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.os, "unlink", lambda path: None)
    found = on_disk(torch.zeros(5000))
    (path,) = folder.iterdir()
    assert path.stat().st_size == 20_000
    with path.open("r+b") as file:
        file.write(torch.ones(1).numpy().tobytes())
    assert found[0] == 1


def test_writing_to_it_is_safe(folder: Path) -> None:
    """Though nothing does: the change is this process's own."""
    found = on_disk(torch.zeros(5000))
    found += 1
    assert torch.equal(found, torch.ones(5000))


def test_a_disk_without_room_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: str) -> tuple[int, str]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", full)
    value = torch.randn(5000)
    with pytest.warns(
        snows.SnowsWarning, match=rf"stay in memory because {folder} .* \(No space left on device\); set TMPDIR"
    ):
        assert torch.equal(on_disk(value), value)


def test_a_file_that_could_not_be_written_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> object:
        raise OSError("5000 requested and 17 written")

    monkeypatch.setattr(disk.os, "fdopen", breaks)
    with pytest.warns(snows.SnowsWarning, match="5000 requested and 17 written"):
        on_disk(torch.randn(5000))
    assert not list(folder.iterdir())


def test_many_take_no_file_handles(folder: Path) -> None:
    handles = Path("/proc/self/fd")
    if not handles.exists():
        pytest.skip("open files are counted on Linux only")
    before = len(list(handles.iterdir()))
    kept = [on_disk(torch.randn(2000)) for _ in range(50)]
    assert len(list(handles.iterdir())) <= before + 1
    assert len(kept) == 50
