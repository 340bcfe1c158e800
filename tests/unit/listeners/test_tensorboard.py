"""A run in TensorBoard, read back with its own reader."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import snows
from snows.events import Counted, Warned
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


def test_without_the_package_it_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(snows.InputError, match=r"install it with: pip install 'snows\[tensorboard\]'"):
        TensorBoard(tmp_path)
