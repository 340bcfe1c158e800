"""Which weights a prune keeps, and which samples it judges them by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from snows import SnowsWarning, run
from snows.errors import StatisticsError
from snows.solve import footprint
from snows.solve import layer as layer_solve
from snows.solve.newton import NewtonResult
from snows.solve.objective import Objective
from tests.networks import make
from tests.prunes import QUICK, SAMPLES, check, quick


@pytest.mark.parametrize("factor", [100.0, float("nan")])
def test_weights_that_do_worse_on_held_out_samples_are_not_kept(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    solve = layer_solve.newton

    def overfit(*arguments: Any) -> NewtonResult:
        return replace(solve(*arguments), weight=arguments[2] * factor, loss=0.0)

    monkeypatch.setattr(layer_solve, "newton", overfit)
    result = quick("conv-bn", "2:4")
    solves = [solve for layer in result.report.layers for solve in layer.solves]
    assert {solve.kept for solve in solves} <= {"least squares", "masked weights"}
    check(result, make("conv-bn"))
    assert result.report.solve_outcomes["worse on held-out samples; the start was kept"] == len(solves)


def test_a_solve_that_goes_too_far_is_kept_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times as far as Newton's method would go."""
    solve = layer_solve.newton

    def too_far(*arguments: Any) -> NewtonResult:
        start, found = arguments[2], solve(*arguments)
        return replace(found, weight=start + 4 * (found.weight - start), loss=0.0)

    monkeypatch.setattr(layer_solve, "newton", too_far)
    report = quick("conv-bn", "2:4", recipe=QUICK.replace(mask_steps=1)).report
    solves = [solve for layer in report.layers for solve in layer.solves if "of the way" in solve.kept]
    assert solves
    for solve_report in solves:
        assert 0 < solve_report.held_out < solve_report.held_out_masked
        assert solve_report.loss > 0  # measured, not that of the solve
    assert report.solve_outcomes["worse on held-out samples; part of the way was kept"] == len(solves)


def test_with_nothing_held_out_every_solve_is_kept() -> None:
    result = quick("conv-bn", "2:4", recipe=QUICK.replace(held_out=0.0))
    check(result, make("conv-bn"))
    assert result.report.held_out_samples == 0
    assert {solve.kept for layer in result.report.layers for solve in layer.solves} == {"solved"}


def test_samples_are_fitted_or_held_out_never_both(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[float]] = {"fitted": set(), "held out": set()}
    cut = run.cut

    def watch(*arguments: Any) -> Any:
        batches = cut(*arguments)
        for index, batch in enumerate(batches.values):
            kind = "held out" if index >= len(batches.sizes) - batches.held_out else "fitted"
            seen[kind] |= set(next(iter(batch.values())).flatten(1)[:, 0].tolist())
        return batches

    monkeypatch.setattr(run, "cut", watch)
    result = quick("residual", "2:4")
    assert (len(seen["fitted"]), len(seen["held out"])) == (18, 6)
    assert not seen["fitted"] & seen["held out"]
    assert (result.report.samples, result.report.held_out_samples) == (SAMPLES, 6)


@pytest.mark.parametrize("minibatch", [None, 4])
def test_curvature_is_that_of_fitted_samples(minibatch: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "_MICRO_BATCH", {"cpu": 4})
    seen: set[int] = set()
    product = Objective.product

    def watch(objective: Objective, *arguments: Any) -> Any:
        seen.update(objective.chosen)
        return product(objective, *arguments)

    monkeypatch.setattr(Objective, "product", watch)
    quick("residual", "2:4", recipe=QUICK.replace(minibatch=minibatch))
    assert seen == set(range(5))  # 18 samples are fitted, 6 held out


def test_statistics_that_cannot_be_used_are_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    def singular(*_: Any) -> None:
        raise StatisticsError("its statistics stay singular")

    monkeypatch.setattr(layer_solve, "RowBlocks", singular)
    with pytest.warns(SnowsWarning, match="solved without its closed form"):
        result = quick("conv-bn", "2:4")
    check(result, make("conv-bn"))
    assert any("stay singular" in warning for warning in result.report.warnings)
    assert any(solve.newton_steps for layer in result.report.layers for solve in layer.solves)
