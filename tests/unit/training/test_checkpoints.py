"""Finished epochs in a folder."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import snows
from snows.events import EpochEnded
from snows.training.checkpoints import Checkpoint, Checkpoints, kept_epochs

WEIGHTS = {"w": torch.zeros(2)}
HISTORY = (
    EpochEnded(0, 2, 0.0, math.inf, {"kl": 0.5}, best=True),
    EpochEnded(1, 2, 0.1, 1.0, {"kl": 0.25}, 9, best=True, recalled=True),
    EpochEnded(2, 2, 0.1, 0.5, {"kl": 0.5}, 9),
)


def checkpoint(*history: EpochEnded) -> Checkpoint:
    return Checkpoint(WEIGHTS, {3: torch.ones(2)}, {"w": torch.ones(2)}, history)


def test_the_newest_epoch_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    assert kept_epochs(folder, "resume=DIR", "call").startswith("no epoch was finished")
    for count, words in ((2, "1 epoch is kept in "), (3, "2 epochs are kept in ")):
        Checkpoints(folder, {}).write(checkpoint(*HISTORY[:count]))
        assert kept_epochs(folder, "resume=DIR", "call").startswith(words)
    found = Checkpoints(folder, {}).read()
    assert found is not None
    assert (found.epoch, found.history) == (2, HISTORY)
    assert torch.equal(found.weights["w"], torch.zeros(2))
    assert torch.equal(found.momentum[3], torch.ones(2))
    assert torch.equal(found.best["w"], torch.ones(2))


@pytest.mark.parametrize("history", [(), HISTORY[1:], (HISTORY[0], HISTORY[2]), (EpochEnded(0, 2, 0.0, 1.0, {}),)])
def test_a_history_that_is_none_of_ours_is_not_used(history: tuple[EpochEnded, ...], tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, {})
    checkpoints._store.write("epoch00001", {"weights": WEIGHTS}, [vars(ended) for ended in history])  # type: ignore[union-attr]
    with pytest.warns(snows.SnowsWarning, match="it has not all epochs"):
        assert checkpoints.read() is None


def test_things_that_are_no_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "epochs" / "epoch00001-x").mkdir(parents=True)
    with pytest.raises(snows.InputError, match="is no regular file"):
        Checkpoints(tmp_path, {})
