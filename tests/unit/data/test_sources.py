"""Data by name: archives that would fill the memory, and names of strangers."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from snows import InputError
from snows.data.sources import DataConfig, load_data, read_npz

PLAIN = DataConfig((0.0,), (1.0,))


def test_a_small_archive_that_unpacks_to_a_gigabyte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=np.zeros((300, 1000, 1000), np.uint8))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(InputError, match="300,000,128 in memory; expected at most 100 times as many"):
        read_npz(path)


def test_arrays_that_are_not_needed_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=np.ones((2, 3), np.float32), other=np.zeros((300, 1000, 1000), np.uint8))
    assert read_npz(path)[0].tolist() == torch.ones(2, 3).tolist()


def test_names_of_arrays_are_safe_for_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, **{"\x1b[2Jevil": np.ones(3)})
    with pytest.raises(InputError, match=r"\\x1b\[2Jevil") as caught:
        read_npz(path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("kind", ["FIFO", "device", "folder"])
def test_data_is_read_from_regular_files(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.npz"
    {"FIFO": os.mkfifo, "device": lambda at: at.symlink_to("/dev/zero"), "folder": Path.mkdir}[kind](path)
    with pytest.raises(InputError, match=f"x.npz is a {kind}; expected a regular file"):
        load_data(f"npz:{path}", 3, config=PLAIN)
