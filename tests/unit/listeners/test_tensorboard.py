"""A run in TensorBoard, read back with its own reader."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import snows
from snows.events import Counted, EpochEnded, RetrainingStarted, TrainingStep, Warned
from snows.listeners import TensorBoard
from tests.networks import example, make


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Epoch(Counted):
        loss: float

    recipe = snows.Recipe(horizon=1, sweeps=2, cg_steps=2, finish_steps=2)
    board = TensorBoard(tmp_path / "board")
    result = snows.prune(
        make("conv-bn"), example("conv-bn", 24), "2:4", recipe=recipe, progress=[board, lambda event: None]
    )
    found = scalars(tmp_path / "board")
    layer = result.report.layers[0]
    assert found[f"{layer.name}/loss"] == [(n + 1, pytest.approx(solve.loss)) for n, solve in enumerate(layer.solves)]
    assert [step for step, _ in found["layers/loss"]] == [0, 1, 2, 3]
    assert {step for step, _ in found["last stage/loss"]} == {0, 2}
    assert "run/seconds" in found
    other = TensorBoard(tmp_path / "epochs")
    other(Warned("be careful"))
    other(Epoch(1, 2, 0.5))
    other(Epoch(2, 2, 0.25))
    other.close()
    assert scalars(tmp_path / "epochs") == {"Epoch/loss": [(1, 0.5), (2, 0.25)]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_epochs_of_a_retraining(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board(RetrainingStarted("Net", {"epochs": 1}, None, 64, 8, "top1", 0, "cpu"))
    board(EpochEnded(0, 1, 0.0, float("nan"), {"top1": 0.25, "loss": 4.0}))
    board(TrainingStep(1, 1, 1, 1, {"top1": 0.25}))
    board(EpochEnded(1, 1, 0.5, 2.0, {"top1": 0.75, "loss": 1.0}))
    board.close()
    assert scalars(tmp_path) == {
        "retraining/lr": [(0, 0.0), (1, 0.5)],
        "retraining/loss": [(1, 2.0)],
        "retraining/held_out_top1": [(0, 0.25), (1, 0.75)],
        "retraining/held_out_loss": [(0, 4.0), (1, 1.0)],
    }


def test_without_the_package_it_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(snows.InputError, match=r"install it with: pip install 'snows\[tensorboard\]'"):
        TensorBoard(tmp_path)
