"""What a user who presses Ctrl-C is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from snows.cli.interruption import Interrupted, keeping_epochs, keeping_layers, kept_cells
from snows.events import EpochEnded
from snows.training.checkpoints import Checkpoint, Checkpoints


def test_ctrl_c_says_what_is_kept(tmp_path: Path) -> None:
    with (
        pytest.raises(Interrupted, match="nothing was saved; --resume DIR keeps finished layers"),
        keeping_layers(None),
    ):
        raise KeyboardInterrupt
    with pytest.raises(Interrupted, match="holds nothing to continue from"), keeping_layers(tmp_path):
        raise KeyboardInterrupt
    assert kept_cells(2, None) == "2 finished; pass --out DIR to continue from here the next time"
    assert kept_cells(2, tmp_path) == "2 finished; the same command continues from here"


def test_ctrl_c_says_which_epochs_are_kept(tmp_path: Path) -> None:
    folder, history = tmp_path / "kept", []
    with (
        pytest.raises(Interrupted, match="nothing was saved; --resume DIR keeps finished epochs"),
        keeping_epochs(None),
    ):
        raise KeyboardInterrupt
    with pytest.raises(Interrupted, match=r"no epoch was finished; .*kept holds nothing"), keeping_epochs(folder):
        raise KeyboardInterrupt
    checkpoints = Checkpoints(folder, {"epochs": 3})
    for epoch, words in ((1, "1 epoch is kept in .*kept; the same"), (2, "2 epochs are kept in .*kept; the same")):
        history.append(EpochEnded(epoch, 3, 0.1, 1.0, {"kl": 0.5}))
        checkpoints.write(Checkpoint({"w": torch.zeros(2)}, {0: torch.ones(2)}, {"w": torch.zeros(2)}, tuple(history)))
        with pytest.raises(Interrupted, match=words), keeping_epochs(folder):
            raise KeyboardInterrupt
    read = checkpoints.read()
    assert read is not None
    assert (read.epoch, read.history) == (2, tuple(history))
    assert torch.equal(read.momentum[0], torch.ones(2))
