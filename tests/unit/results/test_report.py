"""The report is the fold of a run's events."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

import snows
from snows.events import (
    ChannelsPermuted,
    DenseLayer,
    Distilled,
    DistillStep,
    EpochEnded,
    Event,
    LayerFacts,
    LayerSolved,
    LayerStarted,
    MemoryEstimated,
    OperationErrors,
    Retrained,
    RetrainingStarted,
    RunFinished,
    RunStarted,
    SolveReport,
    TrainingStep,
    Warned,
)
from snows.results.report import Report, add, fold

STARTED = RunStarted(
    model="Net",
    pattern="2:4",
    mask="magnitude",
    recipe={"sweeps": 2, "ridge": 1e-6},
    layers=(
        LayerFacts("query", "query.weight", (8, 4), "2:4", 3, ("query", "key")),
        LayerFacts("key", "key.weight", (8, 4), "2:4", 3, ("query", "key")),
        LayerFacts("out", "out.weight", (4, 4), "1:4", 2, ("out",)),
    ),
    dense_layers=(DenseLayer("head", (10, 4), "it is the last layer"),),
    network_weights=200,
    samples=100,
    held_out_samples=5,
    seed=7,
    device="cpu",
    versions={"snows": "1", "torch": "2"},
)
FINISHED = RunFinished({"query.weight": 16, "key.weight": 16, "out.weight": 4}, 12.5, 3, 1 << 20)


def solve(sweep: int = 0, outcome: str = "converged", **changes: object) -> SolveReport:
    report = SolveReport(sweep, 3.0, 2.0, 1.0, "least squares", outcome, 1, 10, 0, "gauss-newton", 1e-6, 0.5)
    return replace(report, losses=(2.0, 1.0), cg_residuals=((0.5, 0.01),), **changes)


def solved(*layers: str, sweep: int = 0, solve: SolveReport) -> LayerSolved:
    return LayerSolved(layers, 0, 2, sweep, 2, solve)


GROUP, ALONE = solved("query", "key", solve=solve()), solved("out", solve=solve(outcome="CG tolerance"))
RUN: list[Event] = [
    Warned("unnormalized pixels"),
    STARTED,
    MemoryEstimated(123),
    ChannelsPermuted(0.7, 0.8),
    LayerStarted(("query", "key"), 0, 2, 0, 2),
    GROUP,
    LayerStarted(("out",), 1, 2, 0, 2),
    ALONE,
    solved("query", "key", sweep=1, solve=solve(1)),
    solved("out", sweep=1, solve=solve(1, "CG tolerance")),
    DistillStep(1, 2),
    DistillStep(2, 2),
    Distilled(2, 0.5, 0.25, 3.0, ((0, 0.5), (2, 0.25))),
    Warned("one row is empty"),
    FINISHED,
]
RETRAINED: list[Event] = [
    RetrainingStarted("Net", {"epochs": 2}, None, 90, 10, "top1", 3, "cpu"),
    EpochEnded(0, 2, 0.0, math.nan, {"top1": 0.5}, best=True, recalled=True),
    EpochEnded(1, 2, 0.1, 2.0, {"top1": 0.75}, 9, best=True, recalled=True),
    TrainingStep(10, 18, 2, 2),
    Warned("labels are odd"),
    EpochEnded(2, 2, 0.1, 1.0, {"top1": 0.7}, 9),
    Retrained(2.5),
]


def strict(report: Report) -> dict[str, object]:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is no JSON")

    data: dict[str, object] = json.loads(report.to_json(), parse_constant=refuse)
    return data


def test_a_whole_run() -> None:
    report = fold(RUN)
    assert (report.model, report.pattern, report.mask, report.device, report.seed) == (
        "Net", "2:4", "magnitude", "cpu", 7,
    )  # fmt: skip
    assert (report.samples, report.held_out_samples, report.network_weights) == (100, 5, 200)
    assert report.recipe == {"sweeps": 2, "ridge": 1e-6}
    assert report.versions == {"snows": "1", "torch": "2"}
    assert report.permutation == {"kept_before": 0.7, "kept_after": 0.8}
    assert report.expected_memory_bytes == 123
    assert (report.seconds, report.recalled_solves, report.peak_memory_bytes) == (12.5, 3, 1 << 20)
    assert report.warnings == ["unnormalized pixels", "one row is empty"]
    assert report.dense_layers == [DenseLayer("head", (10, 4), "it is the last layer")]
    assert [(layer.name, layer.shape, layer.weights, layer.kept) for layer in report.layers] == [
        ("query", [8, 4], 32, 16), ("key", [8, 4], 32, 16), ("out", [4, 4], 16, 4),
    ]  # fmt: skip
    assert [layer.sparsity for layer in report.layers] == [0.5, 0.5, 0.75]
    assert report.sparsity == 1 - 36 / 80
    assert report.network_sparsity == 44 / 200


def test_a_retraining_goes_on_from_the_report() -> None:
    before = replace(fold(RUN), evaluation=[{"network": "pruned"}])
    report = fold(RETRAINED, before)
    done = report.retraining
    assert done is not None
    assert (done.samples, done.held_out_samples, done.seconds, done.finished) == (90, 10, 2.5, True)
    assert (done.best_epoch, done.recalled_epochs, done.before, done.after) == (1, 1, {"top1": 0.5}, {"top1": 0.75})
    assert replace(report, retraining=None, warnings=[], evaluation=[]) == replace(fold(RUN), warnings=[])
    assert report.warnings == ["unnormalized pixels", "one row is empty", "labels are odd"]
    assert (before.retraining, len(before.warnings), len(before.evaluation), report.evaluation) == (None, 2, 1, [])
    data: Any = strict(report)["retraining"]
    assert (data["best_epoch"], data["recalled_epochs"], data["history"][0]["loss"]) == (1, 1, None)
    other = fold([*RUN, replace(RETRAINED[0], seed=4)]).retraining  # type: ignore[type-var]  # an event
    assert other is not None
    assert (other.history, other.finished, other.best_epoch) == ([], False, 0)


def test_which_events_change_the_report() -> None:
    report = Report()
    told = {type(event) for event in [*RUN, *RETRAINED] if add(event, report)}
    assert told == {type(event) for event in [*RUN, *RETRAINED]} - {LayerStarted, DistillStep, TrainingStep}


def test_a_group_shares_its_solves_and_counts_once() -> None:
    report = fold(RUN)
    query, key, out = report.layers
    assert query.solves == key.solves == [solve(), solve(1)]
    assert out.solves == [ALONE.solve, solve(1, "CG tolerance")]
    assert query.group == ["query", "key"]
    assert report.solve_outcomes == {"converged": 2, "CG tolerance": 2}


def test_what_happened_on_the_way_is_counted() -> None:
    hard = solve(negative_curvature=2, relative_damping=1e-4, kept="the start")
    halfway = solve(kept="half of the way")
    report = fold([STARTED, solved("query", "key", solve=hard), solved("out", solve=halfway)])
    assert report.solve_outcomes == {
        "converged": 2,
        "worse on held-out samples; the start was kept": 1,
        "worse on held-out samples; part of the way was kept": 1,
        "negative curvature in CG": 2,
        "singular statistics, damped more": 1,
    }


def test_the_json_keys_are_those_of_every_version() -> None:
    """Programs read them, and `snows.verify` does."""
    data = strict(fold(RUN))
    assert list(data) == [
        "model", "pattern", "mask", "recipe", "permutation", "samples", "held_out_samples", "seed", "device", "layers",
        "dense_layers", "finish", "retraining", "network_weights", "network_flops", "attention_flops", "seconds",
        "recalled_solves", "peak_memory_bytes", "expected_memory_bytes", "warnings", "versions", "evaluation",
        "operations", "phases", "schema", "finished", "sparsity", "network_sparsity", "flops", "events",
    ]  # fmt: skip
    assert data["schema"] == 1
    curve = [[0, 0.5], [2, 0.25]]
    assert data["finish"] == {"steps": 2, "loss_before": 0.5, "loss": 0.25, "seconds": 3.0, "curve": curve}
    assert data["events"] == {"converged": 2, "CG tolerance": 2}
    assert data["dense_layers"] == [{"name": "head", "shape": [10, 4], "reason": "it is the last layer"}]
    first = data["layers"][0]  # type: ignore[index]
    assert list(first) == [
        "name", "parameter", "shape", "pattern", "weights", "kept", "horizon", "group", "solves", "flops",
        "picture", "sparsity",
    ]  # fmt: skip
    assert list(first["solves"][0]) == list(SolveReport.__dataclass_fields__)


def test_figures_that_there_are_not_are_null() -> None:
    nothing = solve(loss=math.nan, loss_masked=math.nan)
    data = strict(fold([STARTED, solved("out", solve=nothing), Distilled(1, math.inf, 1.0, 1.0)]))
    assert data["layers"][2]["solves"][0]["loss"] is None  # type: ignore[index]
    assert data["finish"]["loss_before"] is None  # type: ignore[index]


def test_no_events_are_an_empty_report() -> None:
    report = fold([])
    assert report == Report()
    assert (report.sparsity, report.network_sparsity, report.solve_outcomes) == (0.0, 0.0, {})
    assert strict(report)["layers"] == []


@pytest.mark.parametrize("length", range(len(RUN) + 1))
def test_an_unfinished_run_is_an_unfinished_report(length: int) -> None:
    report = fold(RUN[:length])
    data = strict(report)
    finished = length == len(RUN)
    assert (report.sparsity > 0) == finished
    assert (data["seconds"] == 0) == (not finished)
    assert report.finished == finished
    assert len(report.layers) == (3 if length >= 2 else 0)


def test_folding_does_not_change_the_events() -> None:
    assert fold(RUN) == fold(RUN)
    assert fold(iter(RUN)) == fold(RUN)


class Odd(Event):
    """An event of a later version."""


events = st.sampled_from([*RUN, *RETRAINED, Odd(), solved("elsewhere", solve=solve())])


@given(st.lists(events))
def test_any_events_in_any_order_give_a_report(run: list[Event]) -> None:
    report = fold(run)
    assert strict(report)["schema"] == 1
    assert 0 <= report.network_sparsity <= report.sparsity < 1


@given(st.lists(events), st.lists(st.sampled_from("abc")), st.randoms(use_true_random=False))
def test_warnings_are_distinct_in_their_order_wherever_they_come(
    run: list[Event], words: list[str], chance: object
) -> None:
    others = [event for event in run if not isinstance(event, Warned)]
    mixed: list[Event] = list(others)
    places = sorted(chance.randrange(len(others) + 1) for _ in words)  # type: ignore[attr-defined]
    for place, word in reversed(list(zip(places, words, strict=True))):
        mixed.insert(place, Warned(word))
    report = fold(mixed)
    assert report.warnings == list(dict.fromkeys(words))
    assert replace(report, warnings=[]) == fold(others)


def test_a_warning_that_came_again_has_its_number() -> None:
    report = fold([Warned("first"), Warned("again"), Warned("first"), Warned("again", 3)])
    assert report.warnings == ["first", "again (3 times)"]
    assert str(Warned("again", 3)) == "warning: again (3 times)"


def test_errors_of_another_run_stand_beside_these() -> None:
    mine = OperationErrors(("a", "b"), 8, {"mask only": (0.5, 1.0), "SNOWS": (0.1, 0.2)}, {})
    light = replace(mine, errors={"mask only": (0.5, 1.0), "SNOWS": (0.2, 0.4)})
    report = fold([*RUN, mine]).beside("layer-wise", fold([*RUN, light]))
    assert report.operations is not None
    assert list(report.operations.errors.items()) == [
        ("mask only", (0.5, 1.0)), ("layer-wise", (0.2, 0.4)), ("SNOWS", (0.1, 0.2)),
    ]  # fmt: skip
    unlike = [fold(RUN), fold([replace(light, samples=9)]), fold([replace(light, names=("a", "c"))])]
    for one, other in [(fold([*RUN, mine]), each) for each in unlike] + [(fold(RUN), fold([light]))]:
        with pytest.raises(snows.ArgumentError, match="do not have errors of the same operations"):
            one.beside("layer-wise", other)
