"""A run: what wraps every step of the cascade, and what happens in which order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from snows.caller import ONE_AT_A_TIME
from snows.devices.memory import Memory
from snows.devices.weights import bytes_of_run
from snows.errors import ArgumentError, InputError, SnowsWarning
from snows.events import (
    CGStep,
    ChannelsPermuted,
    Distilled,
    DistillStep,
    Event,
    LayerSolved,
    LayerStarted,
    MemoryEstimated,
    RunFinished,
    RunStarted,
    SolveReport,
    Warned,
)
from snows.masks import Choice
from snows.patterns import PatternRules
from snows.recipe import Recipe
from snows.results.journal import Journal
from snows.results.report import fold
from snows.run import Run, open_run
from snows.solve.cascade import CascadeRun, Group, cascade, mask_group, solve_group
from snows.solve.estimate import Estimate
from snows.solve.layer import SolvedLayer
from snows.task import Task
from tests.networks import example, make

RECIPE = Recipe(horizon=1, sweeps=2, mask_steps=1, cg_steps=3)
SAMPLES = 40
FEWER = torch.arange(144).view(4, 4, 3, 3) % 3 > 0  # a mask of layer 3


def task(name: str = "conv-bn", pattern: str | None = "2:4", **changes: Any) -> Task:
    asked = Task(
        model=make(name),
        calibration=example(name, SAMPLES),
        rules=None if pattern is None else PatternRules.parse(pattern),
        mask="magnitude",
        layers=None,
        exclude=None,
        recipe=RECIPE,
        readjusts=True,
        device=None,
        seed=0,
        given_labels=False,
        permute=False,
        resume=None,
        memory=None,
    )
    return replace(asked, **changes)


@pytest.fixture
def run() -> Iterator[Run]:
    with open_run(task()) as opened:
        yield opened


class FakeJournal(Journal):
    """Notes what is recorded, and recalls what it was given."""

    def __init__(self, known: dict[tuple[int, int], SolvedLayer] | None = None) -> None:
        self.known, self.recorded = known or {}, []
        self.choices: dict[int, Choice] = {}

    def recall(self, sweep: int, index: int) -> SolvedLayer | None:
        self.recalled += (sweep, index) in self.known
        return self.known.get((sweep, index))

    def record(self, sweep: int, index: int, solved: SolvedLayer) -> None:
        self.recorded.append((sweep, index, solved))

    def recall_choice(self, sweep: int) -> Choice | None:
        return self.choices.get(sweep)

    def record_choice(self, sweep: int, choice: Choice) -> None:
        self.choices[sweep] = choice


def all_events(asked: Task, step: Callable[[CascadeRun, Group], SolvedLayer] = solve_group) -> list[Event]:
    with open_run(asked) as run:
        cascade(run, step)
        run.distill()
        run.finish()
    return run.events


def solved_like(run: Run, group: Group, value: float) -> SolvedLayer:
    """Constant weights under full masks."""
    shapes = {planned.layer.parameter: planned.layer.shape for planned in group}
    report = SolveReport(0, 1.0, 1.0, 1.0, "masked weights", "test", 0, 0, 0, "", 0.0, 7.0)
    return SolvedLayer(
        {name: torch.full(shape, value, dtype=torch.float64) for name, shape in shapes.items()},
        {name: torch.ones(shape, dtype=torch.bool) for name, shape in shapes.items()},
        report,
    )


# Events


def test_events_come_in_order() -> None:
    events = all_events(task())
    assert isinstance(events[0], RunStarted)
    assert isinstance(events[-1], RunFinished)
    layers = [event for event in events if isinstance(event, LayerStarted)]
    assert layers == [event for event in events[1:-1] if not isinstance(event, CGStep)]
    assert [(type(e), e.layers, e.sweep, e.index, e.total, e.sweeps) for e in layers] == [
        (kind, layer, sweep, index, 2, 2)
        for sweep in (0, 1)
        for index, layer in enumerate([("3",), ("7",)])
        for kind in (LayerStarted, LayerSolved)
    ]
    assert [event.solve.sweep for event in layers if isinstance(event, LayerSolved)] == [0, 0, 1, 1]


def test_listeners_hear_every_event_in_order() -> None:
    heard: tuple[list[Event], list[Event]] = ([], [])
    with open_run(task(), heard[0].append, heard[1].append) as run:
        cascade(run)
    assert heard[0] == heard[1] == run.events
    assert sum(isinstance(event, LayerStarted) for event in run.events) == 8


def test_what_the_run_starts_with() -> None:
    with open_run(task(layers=("3", "7"), exclude=("7",), seed=3)) as run:
        (started,) = run.events
    assert isinstance(started, RunStarted)
    (layer,) = started.layers
    assert (layer.name, layer.parameter, layer.shape) == ("3", "3.weight", (4, 4, 3, 3))
    assert (layer.pattern, layer.horizon, layer.group) == ("2:4", 1, ("3",))
    assert {each.name: each.reason for each in started.dense_layers} == {
        "0": "not among the chosen layers",
        "7": "excluded",
        "11": "not among the chosen layers",
    }
    assert (started.model, started.pattern, started.mask) == ("Sequential", "2:4", "magnitude")
    assert (started.samples, started.held_out_samples, started.seed) == (SAMPLES, 8, 3)
    assert started.network_weights == sum(p.numel() for p in make("conv-bn").parameters())
    assert started.device == "cpu"


def test_warnings_are_events_in_their_place() -> None:
    model = make("conv-bn").train()
    with pytest.warns(SnowsWarning) as caught:
        events = all_events(task(model=model, exclude=("nothing",)))
    assert [type(event) for event in events[:3]] == [Warned, Warned, RunStarted]
    assert [str(each.message) for each in caught] == [each.message for each in events[:2] if isinstance(each, Warned)]
    assert "train mode" in str(caught[0].message)


def test_the_last_stage_comes_between_the_cascade_and_the_end() -> None:
    events = all_events(task(recipe=RECIPE.replace(finish_steps=2, finish_rate=1e-3)))
    assert [type(event) for event in events[-5:]] == [LayerSolved, DistillStep, DistillStep, Distilled, RunFinished]
    assert not [e for e in all_events(task()) if isinstance(e, DistillStep | Distilled)]


def test_the_last_stage_changes_what_it_trained() -> None:
    with open_run(task(recipe=RECIPE.replace(finish_steps=5, finish_rate=1e-2))) as run:
        cascade(run)
        before = dict(run.weights)
        run.distill()
        model = run.finish()
    for name, value in make("conv-bn").named_parameters():
        trained = name in run.masks or name in run.graph.vectors
        assert trained == (not torch.equal(value, model.get_parameter(name)))
        if trained:
            assert not torch.equal(before[name], model.get_parameter(name))


@pytest.mark.parametrize(
    ("device", "readjusts", "estimated"),
    [("xpu", True, True), ("xpu", False, False), ("cpu", True, False), ("cpu", False, False)],
)
def test_memory_is_estimated_before_the_first_layer_on_devices_with_memory_of_their_own(
    device: str, readjusts: bool, estimated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "device", torch.device(device))  # tensors stay where they are
    monkeypatch.setattr(Estimate, "peak", lambda estimate: 1000 * estimate.samples + estimate.micro_batch)
    events = all_events(task(readjusts=readjusts), solve_group if readjusts else mask_group)
    expected = [MemoryEstimated(40_032)] if estimated else []
    assert [event for event in events if isinstance(event, MemoryEstimated)] == expected
    assert [type(event) for event in events[: 2 + estimated]] == [RunStarted, *map(type, expected), LayerStarted]
    assert fold(events).expected_memory_bytes == (40_032 if estimated else None)


def test_permuting_is_an_event_before_the_run_starts() -> None:
    events = all_events(task("mlp", permute=True))
    permuted, started = events[:2]
    assert isinstance(permuted, ChannelsPermuted)
    assert isinstance(started, RunStarted)
    assert permuted.kept_after >= permuted.kept_before > 0


# Steps


def test_a_finished_step_is_recorded_once_with_its_seconds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.journal = journal = FakeJournal()
    clock = iter([10.0, 12.5, 20.0, 21.0])
    groups = run.sweep(0)
    first = next(groups)
    monkeypatch.setattr("snows.run.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    solved = run.attempt(lambda run, group: solved_like(run, group, 1.0), first)
    assert solved.solve.seconds == 2.5
    assert journal.recorded == [(0, 0, solved)]
    run.attempt(lambda run, group: solved_like(run, group, 2.0), next(groups))
    assert [(sweep, index) for sweep, index, _ in journal.recorded] == [(0, 0), (0, 1)]


def test_an_accepted_step_changes_weights_and_masks_and_is_an_event(run: Run) -> None:
    for group in run.sweep(0):
        run.choose(group)
        run.accept(group, solved_like(run, group, 3.0))
        name = group[0].layer.parameter
        assert (run.weights[name] == 3.0).all()
        assert run.choose(group)[name].all()
        event = run.events[-1]
        assert isinstance(event, LayerSolved)
        assert (event.layers, event.solve.seconds) == ((group[0].layer.name,), 7.0)
    assert list(run.masks) == ["3.weight", "7.weight"]
    assert all(mask.all() for mask in run.masks.values())
    model = run.finish()
    assert (model.get_parameter("3.weight") == 3.0).all()
    finished = run.events[-1]
    assert isinstance(finished, RunFinished)
    assert finished.kept == {"3.weight": 4 * 4 * 9, "7.weight": 16}


def test_out_of_memory_is_tried_again_with_smaller_pieces(run: Run) -> None:
    run.journal = journal = FakeJournal()
    sizes: list[int] = []

    def step(run: CascadeRun, group: Group) -> SolvedLayer:
        sizes.append(run.problem(group).sizes[0])
        if sizes[-1] > 10:
            raise torch.OutOfMemoryError
        return solved_like(run, group, 1.0)  # type: ignore[arg-type]

    groups = run.sweep(0)
    with pytest.warns(SnowsWarning, match="out of memory at 3: going on with"):
        run.attempt(step, next(groups))
    run.attempt(step, next(groups))
    assert sizes == [32, 16, 8, 8]
    assert [(sweep, index) for sweep, index, _ in journal.recorded] == [(0, 0), (0, 1)]


def test_other_errors_of_a_step_are_not_tried_again(run: Run) -> None:
    calls: list[Group] = []

    def step(run: CascadeRun, group: Group) -> SolvedLayer:
        calls.append(group)
        raise RuntimeError("broken")

    run.journal = journal = FakeJournal()
    with pytest.raises(RuntimeError, match="broken"):
        run.attempt(step, next(run.sweep(0)))
    assert (len(calls), journal.recorded) == (1, [])


def test_what_is_recalled_is_not_solved_again() -> None:
    with open_run(task()) as first:
        first.journal = journal = FakeJournal()
        cascade(first)
        first.finish()
    entries = {(sweep, index): solved for sweep, index, solved in journal.recorded}
    assert list(entries) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    half = {key: entry for key, entry in entries.items() if key[0] == 0}
    solves: list[str] = []

    def step(run: CascadeRun, group: Group) -> SolvedLayer:
        solves.append(group[0].layer.name)
        return solve_group(run, group)

    with open_run(task()) as second:
        second.journal = again = FakeJournal(half)
        cascade(second, step)
        second.finish()
    assert solves == ["3", "7"]
    assert [(sweep, index) for sweep, index, _ in again.recorded] == [(1, 0), (1, 1)]
    finished = second.events[-1]
    assert isinstance(finished, RunFinished)
    assert finished.recalled_solves == 2
    for name, mask in first.masks.items():
        assert torch.equal(mask, second.masks[name])
        assert torch.equal(first.weights[name], second.weights[name])


def test_masks_that_are_chosen_together_are_recorded_and_recalled() -> None:
    with open_run(task(mask="woodfisher")) as run:
        run.journal = journal = FakeJournal()
        next(run.sweep(0))
        chosen = dict(run.masks)
        assert list(journal.choices) == [0]
        assert set(journal.choices[0].masks) == set(chosen)
    others = {name: ~mask for name, mask in chosen.items()}
    with open_run(task(mask="woodfisher")) as run:
        run.journal = again = FakeJournal()
        again.choices[0] = Choice(others)
        next(run.sweep(0))
        assert all(torch.equal(mask, others[name]) for name, mask in run.masks.items())
    with open_run(task(mask="obc")) as run:  # chosen layer by layer, and recorded with each layer
        run.journal = by_layer = FakeJournal()
        cascade(run)
        assert by_layer.choices == {}


# Masks and weights of a sweep


def test_masks_are_chosen_anew_where_patterns_change() -> None:
    """2:4 first, then 1:4; the third sweep keeps the masks of the second."""
    asked = task("mlp", "1:4", recipe=RECIPE.replace(sweeps=3, mask_steps=2))
    turns: list[tuple[int, int, bool]] = []

    def step(run: CascadeRun, group: Group) -> SolvedLayer:
        turns.append((run.turn.sweep, run.turn.index, run.turn.new_mask))
        return solve_group(run, group)

    with open_run(asked) as run:
        cascade(run, step)
        assert int(run.masks["2.weight"].sum()) == 16
    assert turns == [(0, 0, True), (1, 0, True), (2, 0, False)]


def test_weights_of_a_mask_method_are_where_solves_start_while_masks_are_new() -> None:
    with open_run(task("mlp", mask="woodfisher")) as run:
        (group,) = list(run.sweep(0))
        name = group[0].layer.parameter
        chosen = run.weights[name]
        assert not torch.equal(chosen, run.graph.parameters[name])
        assert not chosen[~run.masks[name]].any()
        run.accept(group, replace(solved_like(run, group, 2.0), masks=dict(run.masks)))
        assert torch.equal(run.weights[name], chosen)  # of this sweep, until it ends
        list(run.sweep(1))
        assert (run.weights[name] == 2.0).all()


def test_weights_of_a_layer_method_are_where_its_layer_starts() -> None:
    class Halving:
        reads = "pruned"

        def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Any) -> Choice:
            mask = pattern.best_mask(weight.abs())
            return Choice({name: mask}, {name: weight * mask / 2})

    with open_run(task(mask=Halving())) as run:
        group = next(run.sweep(0))
        name = group[0].layer.parameter
        before = run.weights[name]
        run.choose(group)
        assert torch.equal(run.weights[name], before * run.choose(group)[name] / 2)


def test_layer_methods_choose_once_for_each_new_mask() -> None:
    calls: list[str] = []

    class Counting:
        reads = "pruned"

        def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Any) -> Choice:
            calls.append(name)
            return Choice({name: pattern.best_mask(weight.abs())})

    with open_run(task(mask=Counting())) as run:
        cascade(run)
    assert calls == ["3.weight", "7.weight"]


@pytest.mark.parametrize(("readjusts", "sweeps"), [(True, 3), (False, 1)])
def test_a_mask_only_run_has_one_sweep(readjusts: bool, sweeps: int) -> None:
    with open_run(task(recipe=Recipe(), readjusts=readjusts)) as run:
        assert (run.settings.sweeps, run.settings.mask_steps) == (sweeps, sweeps)
        started = run.events[0]
        assert isinstance(started, RunStarted)
        assert {layer.horizon for layer in started.layers} == ({4, 2} if readjusts else {None})
        assert started.held_out_samples == (8 if readjusts else 0)


def test_given_masks_take_one_step() -> None:
    with open_run(task(pattern=None, mask={"3": FEWER}, recipe=Recipe())) as run:
        assert (run.settings.sweeps, run.settings.mask_steps) == (3, 1)
        started = run.events[0]
        assert isinstance(started, RunStarted)
        assert (started.pattern, started.mask) == ("given", "given")
        next(run.sweep(0))
        assert torch.equal(run.masks["3.weight"], FEWER)


# How a run is opened and closed


def another_run_may_start() -> bool:
    """Whether another thread could take the lock of runs."""
    free: list[bool] = []

    def try_the_lock() -> None:
        free.append(ONE_AT_A_TIME.acquire(blocking=False))
        if free[-1]:
            ONE_AT_A_TIME.release()

    thread = threading.Thread(target=try_the_lock)
    thread.start()
    thread.join()
    return free[-1]


def test_a_run_is_closed_in_every_case() -> None:
    def fail() -> None:
        assert not another_run_may_start()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), open_run(task()):
        fail()
    assert another_run_may_start()
    with pytest.raises(InputError, match="the calibration data is an int"), open_run(task(calibration=3)):
        pass
    assert another_run_may_start()


def test_random_numbers_of_the_caller_do_not_matter() -> None:
    masks = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with open_run(task(mask="random", readjusts=False)) as run:
            cascade(run, mask_group)
        masks.append(run.masks)
    assert all(torch.equal(masks[0][name], masks[1][name]) for name in masks[0])


def test_the_memory_that_was_asked_for_is_used() -> None:
    weights = bytes_of_run(make("conv-bn"))
    with open_run(task(memory=100_000)) as run:
        assert run.memory == Memory(100_000 - weights, host=0)


def test_the_probe_holds_a_few_samples_in_the_models_dtype() -> None:
    with open_run(task(model=make("conv-bn").float())) as run:
        args, kwargs = run.probe()
    assert kwargs == {}
    assert args[0].dtype == torch.float32
    assert 0 < len(args[0]) <= SAMPLES


def test_the_original_is_not_touched() -> None:
    model = make("conv-bn")
    with open_run(task(model=model)) as run:
        cascade(run)
        pruned = run.finish()
    assert type(pruned) is type(model)
    for name, value in make("conv-bn").state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_permuting_needs_groups_and_no_given_masks() -> None:
    for words, asked in (
        ("^permute is for N:M patterns", task(pattern="0.5", permute=True)),
        ("which a given mask would not follow", task(pattern=None, mask={"3": FEWER}, permute=True)),
    ):
        with pytest.raises(ArgumentError, match=words), open_run(asked):
            pass


def test_permuting_needs_one_layer_with_groups() -> None:
    patterns = PatternRules.parse({"conv1": "2:4", "*": 0.5})
    with open_run(task("residual", permute=True, rules=patterns)) as run:
        assert any(isinstance(event, ChannelsPermuted) for event in run.events)


def test_a_run_needs_layers() -> None:
    with pytest.raises(InputError, match=r"^no layer can be pruned"), open_run(task(exclude=("3", "7"))):
        pass


def test_a_journal_of_the_same_call_is_accepted_and_of_another_refused(tmp_path: Path) -> None:
    with open_run(task(resume=tmp_path / "state")) as run:
        next(run.sweep(0))
    with open_run(task(resume=tmp_path / "state")):
        pass
    for change in ({"seed": 1}, {"layers": ("3",)}, {"memory": 1 << 30}, {"given_labels": False, "mask": "obc"}):
        with pytest.raises(InputError, match="other settings"), open_run(task(resume=tmp_path / "state", **change)):
            pass
