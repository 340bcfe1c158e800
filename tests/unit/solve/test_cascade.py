"""The main loop on a run that only notes what it is asked: which groups, in which order, and what is asked of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from snows.devices.memory import Memory
from snows.errors import InputError
from snows.events import SolveReport, ignore
from snows.solve import cascade as module
from snows.solve.cascade import Group, Step, cascade, mask_group, solve_group
from snows.solve.layer import SolvedLayer, Turn


def group(*names: str) -> Group:
    return tuple(SimpleNamespace(layer=SimpleNamespace(name=name, parameter=f"{name}.weight")) for name in names)  # type: ignore[misc]


GROUPS = [group("a"), group("q", "k", "v"), group("z")]


def solved(name: str) -> SolvedLayer:
    report = SolveReport(0, 1.0, 1.0, 1.0, name, "test", 0, 0, 0, "", relative_damping=0.0, seconds=0.0)
    return SolvedLayer({}, {}, report)


class FakeRun:
    """Notes every call. `recalled` are the groups, by sweep and first layer, that an earlier run has finished."""

    def __init__(self, sweeps: int = 2, recalled: tuple[tuple[int, str], ...] = ()) -> None:
        self.settings: Any = SimpleNamespace(sweeps=sweeps)
        self.memory = Memory(1 << 30)
        self.recalled = recalled
        self.calls: list[tuple[object, ...]] = []
        self.number, self.current = -1, ""
        self.weights: Mapping[str, Tensor] = {"a.weight": torch.tensor([1.0, 2.0, 3.0])}
        self.turn = Turn(seed=5, sweep=3, index=1)
        self.notify = ignore

    def sweep(self, number: int) -> Iterator[Group]:
        self.calls.append(("sweep", number))
        for each in GROUPS:
            self.number, self.current = number, each[0].layer.name
            yield each

    def problem(self, group: Group) -> Any:
        self.calls.append(("problem", group))
        return "the problem"

    def choose(self, group: Group, problem: Any = None) -> Mapping[str, Tensor]:
        self.calls.append(("choose", group, problem))
        return {"a.weight": torch.tensor([True, False, True]), "other": torch.ones(2).bool()}

    def recall(self) -> SolvedLayer | None:
        self.calls.append(("recall", self.current))
        return solved("recalled") if (self.number, self.current) in self.recalled else None

    def attempt(self, step: Step, group: Group) -> SolvedLayer:
        self.calls.append(("attempt", self.current))
        assert group[0].layer.name == self.current
        return step(self, group)

    def accept(self, group: Group, solved: SolvedLayer) -> None:
        self.calls.append(("accept", group[0].layer.name, solved.solve.start))


def step(run: Any, group: Group) -> SolvedLayer:
    return solved(f"step of {group[0].layer.name}")


def test_every_group_of_every_sweep_is_recalled_attempted_and_accepted_once() -> None:
    run = FakeRun()
    cascade(run, step)
    assert run.calls == [
        call
        for sweep in (0, 1)
        for call in [
            ("sweep", sweep),
            *(
                each
                for name in ("a", "q", "z")
                for each in [("recall", name), ("attempt", name), ("accept", name, f"step of {name}")]
            ),
        ]
    ]


def test_what_is_recalled_is_accepted_and_not_attempted() -> None:
    run = FakeRun(sweeps=1, recalled=((0, "a"), (0, "q")))
    cascade(run, step)
    assert run.calls == [
        ("sweep", 0), ("recall", "a"), ("accept", "a", "recalled"), ("recall", "q"), ("accept", "q", "recalled"),
        ("recall", "z"), ("attempt", "z"), ("accept", "z", "step of z"),
    ]  # fmt: skip


def test_a_group_is_accepted_before_the_next_one_is_looked_at() -> None:
    """The pruned stream reads the weights of a layer when it passes it."""
    run, seen = FakeRun(sweeps=1), []
    names = iter(run.sweep(0))
    run.calls.clear()
    run.sweep = lambda number: (seen.append(list(run.calls)) or each for each in names)  # type: ignore[assignment,func-returns-value]
    cascade(run, step)
    assert [calls[-1] for calls in seen[1:]] == [("accept", "a", "step of a"), ("accept", "q", "step of q")]


def test_an_error_ends_the_loop_and_nothing_is_accepted() -> None:
    def broken(run: Any, group: Group) -> SolvedLayer:
        raise InputError("cannot be solved")

    run = FakeRun()
    with pytest.raises(InputError, match="cannot be solved"):
        cascade(run, broken)
    assert run.calls == [("sweep", 0), ("recall", "a"), ("attempt", "a")]


def test_layers_are_solved_unless_another_step_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "solve_layer", lambda *arguments: solved("solve_layer"))
    run = FakeRun(sweeps=1)
    cascade(run)
    assert [call for call in run.calls if call[0] == "accept"] == [
        ("accept", n, "solve_layer") for n in ("a", "q", "z")
    ]


def test_a_group_is_solved_with_the_masks_that_its_problem_leads_to(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(module, "solve_layer", lambda *arguments: given.extend(arguments) or solved("x"))
    run = FakeRun()
    solve_group(run, GROUPS[1])
    assert run.calls == [("problem", GROUPS[1]), ("choose", GROUPS[1], "the problem")]
    problem, weights, masks, settings, memory, turn, notify = given
    assert problem == "the problem"
    assert weights is run.weights
    assert set(masks) == {"a.weight", "other"}
    assert settings is run.settings
    assert memory is run.memory
    assert turn is run.turn
    assert notify is run.notify


def test_a_group_is_masked_without_a_problem() -> None:
    run = FakeRun()
    result = mask_group(run, GROUPS[0])
    assert run.calls == [("choose", GROUPS[0], None)]
    assert list(result.weights) == list(result.masks) == ["a.weight"]
    assert result.weights["a.weight"].tolist() == [1.0, 0.0, 3.0]
    assert result.masks["a.weight"].tolist() == [True, False, True]
    assert result.solve.sweep == 3
    assert (result.solve.outcome, result.solve.start) == ("mask only", "masked weights")
    assert math.isnan(result.solve.loss)
