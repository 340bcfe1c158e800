"""Results that the model's dtype cannot hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from snows.errors import SnowsWarning
from snows.events import Distilled
from snows.solve.layer import SolvedLayer, mask_layer
from snows.solve.limits import OUTCOME, Limits

HALF = Limits({"a": torch.float16, "b": torch.float32})
BEFORE = {"a": torch.tensor([[6e4, -5e4]]), "b": torch.tensor([[1.0, 2.0]])}
MASKS = {"a": torch.tensor([[True, False]]), "b": torch.tensor([[False, True]])}


def solved(**values: float) -> SolvedLayer:
    layer = mask_layer(list(values), BEFORE, MASKS, 0)
    report: Any = {**vars(layer.solve), "loss_masked": 3.0, "loss": 1.0, "held_out_masked": 4.0, "held_out": 2.0}
    weights = {name: MASKS[name] * value for name, value in values.items()}
    return SolvedLayer(weights, layer.masks, type(layer.solve)(**report))


@pytest.mark.parametrize("values", [{"a": 65504.0}, {"a": -6e4, "b": 1e38}])
def test_what_fits_is_kept(values: dict[str, float]) -> None:
    layer = solved(**values)
    assert HALF.solved(layer, BEFORE) is layer


@pytest.mark.parametrize("values", [{"a": 65520.0}, {"b": 1.0, "a": -7e4}, {"b": math.inf}, {"a": math.nan}])
def test_what_does_not_fit_is_kept_at_its_start(values: dict[str, float]) -> None:
    with pytest.warns(SnowsWarning, match=r"^the new values of [ab] are not finite in the model's float(16|32); the m"):
        kept = HALF.solved(solved(**values), BEFORE)
    assert {name: weight.tolist() for name, weight in kept.weights.items()} == {
        name: {"a": [[6e4, 0.0]], "b": [[0.0, 2.0]]}[name] for name in values
    }
    assert (kept.solve.loss, kept.solve.held_out, kept.solve.outcome) == (3.0, 4.0, OUTCOME)


def test_a_last_stage_that_does_not_fit_changes_nothing() -> None:
    ended = Distilled(10, 2.0, 1.0, 0.5)
    fitting = {"a": torch.tensor([6e4])}
    assert HALF.distilled(fitting, ended) == (fitting, ended)
    with pytest.warns(SnowsWarning, match="the network before the last stage is kept"):
        changed, after = HALF.distilled({"b": torch.ones(1), "a": torch.tensor([7e4])}, ended)
    assert changed == {}
    assert (after.loss_before, after.loss) == (2.0, 2.0)
