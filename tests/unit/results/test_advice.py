"""Which layers are marked, and what is said about them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from snows.events import Event, LayerFacts, SolveReport
from snows.results.advice import advice
from snows.results.report import fold
from tests.unit.results.test_report import STARTED, solve, solved


def said(losses: list[float], horizons: list[int] | None = None, **changes: Any) -> dict[int, str]:
    """The advice for single layers with these losses; `changes` are of every solve."""
    names = [f"l{place}" for place in range(len(losses))]
    facts = tuple(
        LayerFacts(name, f"{name}.weight", (4, 4), "2:4", (horizons or [1] * len(losses))[place], (name,))
        for place, name in enumerate(names)
    )
    run: list[Event] = [replace(STARTED, layers=facts, recipe={"cg_steps": 20})]
    for name, loss in zip(names, losses, strict=True):
        report: SolveReport = replace(solve(), loss=loss, **changes)
        run.append(solved(name, solve=report))
    return advice(fold(run).to_dict())


def test_the_largest_errors_come_first_and_are_few() -> None:
    assert list(said([1.0, 5.0, 1.0, 1.0, 9.0, 1.0])) == [4, 1]
    assert list(said([1.0] * 10 + [5.0, 6.0, 7.0, 8.0])) == [13, 12, 11]
    assert said([1.0, 1.5, 1.9]) == {}
    assert said([]) == {}


def test_a_loss_over_more_operations_counts_less() -> None:
    assert said([2.0, 8.0, 2.0], [1, 7, 1]) == {}
    assert list(said([2.0, 8.0, 2.0], [1, 1, 1])) == [1]


def test_what_to_do_follows_from_the_cause() -> None:
    losses = [1.0, 9.0, 1.0]
    lighter = 'ive it a lighter pattern or leave it dense: exclude=["l1"].'
    assert said(losses)[1] == f"Its error is 9.0 times the median of all layers. G{lighter}"
    assert "fitted noise, so the start was kept: more calibration samples" in said(losses, kept="the start")[1]
    limited = said(losses, cg_residuals=((0.5,) * 20,))[1]
    assert "CG stopped at its limit of 20 steps: try a recipe with cg_steps=60, or g" + lighter in limited
    worse = [solved("query", "key", solve=replace(solve(), loss=1.0, held_out=1.0))]
    worse.append(solved("out", solve=replace(solve(), loss=10.0, held_out=90.0)))
    assert "It does worse on held-out samples than on fitted ones" in advice(fold([STARTED, *worse]).to_dict())[2]


def test_layers_solved_together_are_one_finding() -> None:
    run = [STARTED, solved("query", "key", solve=replace(solve(), loss=90.0)), solved("out", solve=solve())]
    facts = replace(STARTED, layers=(*STARTED.layers, *(replace(STARTED.layers[2], name=n, group=(n,)) for n in "abc")))
    run[0] = facts
    assert list(advice(fold([*run, *(solved(name, solve=solve()) for name in "abc")]).to_dict())) == [0]


def test_layers_that_were_not_solved_have_no_error() -> None:
    assert advice(fold([STARTED]).to_dict()) == {}
    assert said([1.0, float("nan"), 1.0]) == {}
