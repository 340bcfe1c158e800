"""Which weights of a solve are kept: held-out samples choose, and the report says what was chosen."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from snows.solve import layer as module
from snows.solve.newton import NewtonOutcome, NewtonResult
from snows.solve.objective import Objective
from tests.problems import problem, settings, solve

WORDS = ("half of the way", "a quarter of the way")


def candidates(values: list[float]) -> list[Any]:
    names = ["masked weights", "least squares", "solved"] if len(values) == 3 else ["masked weights", "solved"]
    return [
        module._Candidate(name, torch.tensor(v, dtype=torch.float64), loss=10 + v)
        for name, v in zip(names, values, strict=True)
    ]


@pytest.mark.parametrize(
    ("best_at", "values", "kept", "weight"),
    [
        (4.0, [0.0, 2.0, 4.0], "solved", 4.0),
        (2.1, [0.0, 2.0, 4.0], "least squares", 2.0),
        (2.9, [0.0, 2.0, 4.0], "half of the way", 3.0),
        (3.2, [0.0, 2.0, 4.0], "solved", 4.0),
        (2.4, [0.0, 2.0, 4.0], "a quarter of the way", 2.5),
        (0.0, [0.0, 2.0, 4.0], "masked weights", 0.0),
        (1.0, [0.0, 4.0], "a quarter of the way", 1.0),
        (0.2, [0.0, 4.0], "masked weights", 0.0),
        (1.9, [0.0, 4.0], "half of the way", 2.0),
        (2.1, [0.0, 4.0], "solved", 4.0),
    ],
)
def test_held_out_samples_choose(best_at: float, values: list[float], kept: str, weight: float) -> None:
    """Losses of held-out samples are squared distances from a point; a part of the way is tried from the best one."""
    held_out: Any = SimpleNamespace(loss=lambda at: float((at - best_at) ** 2))
    best = module._best(held_out, candidates(values))
    assert best.name == kept
    assert float(best.weight) == weight
    assert best.held_out == pytest.approx((weight - best_at) ** 2)
    assert best.held_out_masked == pytest.approx(best_at**2)
    assert math.isnan(best.loss) == ("of the way" in kept)
    assert [(each.name, each.held_out) for each in best.tried[: len(values)]] == [
        (each.name, pytest.approx((float(each.weight) - best_at) ** 2)) for each in candidates(values)
    ]
    assert (kept in [each.name for each in best.tried[len(values) :]]) == ("of the way" in kept)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_losses_that_are_not_finite_are_never_the_best(bad: float) -> None:
    losses = {0.0: 5.0, 2.0: bad, 4.0: bad}
    asked: list[float] = []

    def loss(at: Tensor) -> float:
        asked.append(float(at))
        return losses[float(at)]

    best = module._best(SimpleNamespace(loss=loss), candidates([0.0, 2.0, 4.0]))  # type: ignore[arg-type]
    assert (best.name, best.held_out, best.held_out_masked) == ("masked weights", 5.0, 5.0)
    assert asked == [0.0, 2.0, 4.0]  # nothing on the way to what is not finite
    losses = {0.0: bad, 2.0: 3.0, 4.0: bad}
    best = module._best(SimpleNamespace(loss=loss), candidates([0.0, 2.0, 4.0]))  # type: ignore[arg-type]
    assert (best.name, best.held_out, best.held_out_masked) == ("least squares", 3.0, math.inf)


def test_of_equal_losses_the_earlier_candidate_is_kept() -> None:
    best = module._best(SimpleNamespace(loss=lambda at: 1.0), candidates([0.0, 2.0, 4.0]))  # type: ignore[arg-type]
    assert best.name == "masked weights"


@pytest.mark.parametrize("kept", ["solved", "least squares", "masked weights", *WORDS])
def test_what_is_kept_is_reported_with_its_losses(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem("mlp", "2.weight", 2, split=(20, 20, 10), held_out=1)
    fitted = given.objective("variance")
    judged: list[tuple[int, ...]] = []

    def choose(held_out: Objective, found: list[Any]) -> Any:
        judged.append(held_out.chosen)
        assert [each.name for each in found] == ["masked weights", "least squares", "solved"]
        for each in found:
            assert each.loss == pytest.approx(fitted.loss(each.weight), rel=1e-9)
        named = {each.name: each for each in found}
        weight = 0.5 * (named["solved"].weight + named["least squares"].weight)
        named |= {word: module._Candidate(word, weight) for word in WORDS}
        return replace(named[kept], held_out=0.25, held_out_masked=0.5)

    monkeypatch.setattr(module, "_best", choose)
    result = solve(given, settings("mlp", start="closed-form"))
    assert judged == [(2,)]
    report = result.solve
    assert report.kept == kept
    assert (report.held_out, report.held_out_masked) == (0.25, 0.5)
    assert report.loss == pytest.approx(fitted.loss(result.weights["2.weight"]), rel=1e-9)
    assert report.start == "least squares"
    assert report.curvature == "gauss-newton"
    assert report.loss_masked > report.loss_start
    assert report.losses[0] == report.loss_start
    assert len(report.losses) == report.newton_steps + 1
    assert [len(solve) for solve in report.cg_residuals] == [report.cg_steps]


def test_a_start_that_newton_did_not_leave_is_called_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem("mlp", "2.weight", 2, split=(20, 20, 10), held_out=1)
    asked: list[list[str]] = []
    best = module._best

    def watch(held_out: Objective, found: list[Any]) -> Any:
        asked.append([each.name for each in found])
        return best(held_out, found)

    def stay(objective: Any, system: Any, weight: Tensor, *others: Any) -> NewtonResult:
        return NewtonResult(weight, 3.0, 3.0, 0, 0, NewtonOutcome.NO_DECREASE)

    monkeypatch.setattr(module, "_best", watch)
    monkeypatch.setattr(module, "newton", stay)
    report = solve(given, settings("mlp")).solve
    assert asked == [["masked weights"]]
    assert report.kept == "solved"
    assert report.loss_masked == report.loss_start == report.loss == 3.0


def test_without_held_out_samples_the_solution_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_best", lambda *_: pytest.fail("there is nothing to judge by"))
    report = solve(problem("mlp", "2.weight", 2, split=(20, 20)), settings("mlp", start="closed-form")).solve
    assert report.kept == "solved"
    assert math.isnan(report.held_out)
    assert math.isnan(report.held_out_masked)
