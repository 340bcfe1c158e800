"""The progress bar, and listeners of the caller's own."""

from __future__ import annotations

import io
import re

import pytest
import torch
from rich.console import Console

import snows
from snows.events import (
    DistillStep,
    Event,
    LayerSolved,
    LayerStarted,
    MemoryEstimated,
    RunFinished,
    RunStarted,
    SolveReport,
)
from snows.listeners.progress import ProgressBar, listening
from tests.networks import example, make

SOLVE = SolveReport(1, 2.0, 1.0, 0.5, "closed form", "converged", 1, 5, 0, "gauss-newton", 1e-6, 0.1)


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120)


def text(console: Console) -> str:
    """What was written, without the codes that move and color it."""
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def shown_after(*events: Event) -> str:
    """The bar that is on the terminal after these events."""
    console = terminal()
    with ProgressBar("starting", console=console) as bar:
        for event in events:
            bar(event)
        bar._progress.refresh()
        return text(console).split("\r")[-1]


def test_it_counts_the_layers_of_all_sweeps() -> None:
    assert re.match(r"starting +━* +0/\?", shown_after())
    assert re.match(r"sweep 2/3 {2}fc \+ fd .* 5/12", shown_after(LayerStarted(("fc", "fd"), 1, 4, 1, 3)))
    assert " 6/12" in shown_after(LayerStarted(("fc",), 1, 4, 1, 3), LayerSolved(("fc",), 1, 4, 1, 3, SOLVE))
    assert re.match("last stage, all layers together .* 7/40", shown_after(DistillStep(7, 40)))


def test_names_are_not_read_as_markup() -> None:
    assert "sweep 1/1  [/red]" in shown_after(LayerStarted(("[/red]",), 0, 1, 0, 1))


def test_the_expected_memory_stays_above_the_bar() -> None:
    console = terminal()
    with ProgressBar(console=console) as bar:
        bar(MemoryEstimated(3 << 30))
    assert "about 3.0 GiB of the device's memory will be used\n" in text(console)


def test_other_work_is_described_and_counted_by_hand() -> None:
    console = terminal()
    with ProgressBar("dense", total=3, completed=1, console=console) as bar:
        bar.describe("wanda")
        bar.advance()
        bar._progress.refresh()
        assert re.match("wanda .* 2/3", text(console).split("\r")[-1])


def test_nothing_is_shown_without_a_terminal_or_if_it_is_not_wanted() -> None:
    for console, shown in ((Console(file=io.StringIO(), force_terminal=False), True), (terminal(), False)):
        with ProgressBar("starting", shown=shown, console=console) as bar:
            bar(LayerStarted(("fc",), 0, 1, 0, 1))
            bar.describe("wanda")
        assert text(console) == ""


def test_what_progress_stands_for(capsys: pytest.CaptureFixture[str]) -> None:
    with listening(True) as bar:
        assert isinstance(bar, ProgressBar)
    with listening(False) as silent:
        silent(MemoryEstimated(1))
    seen: list[Event] = []
    with listening(seen.append) as own:
        own(MemoryEstimated(1))
    assert seen == [MemoryEstimated(1)]
    assert capsys.readouterr() == ("", "")


def test_the_bar_is_closed_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError), ProgressBar(console=terminal()) as bar:
        raise ZeroDivisionError
    assert bar._progress.finished or not bar._progress.live.is_started


def events_of_a_run(**options: object) -> list[Event]:
    seen: list[Event] = []
    recipe = snows.Recipe(horizon=1, sweeps=2, cg_steps=2, finish_steps=3)
    snows.prune(make("conv-bn"), example("conv-bn", 24), "2:4", recipe=recipe, progress=seen.append, **options)
    return seen


def test_a_listener_from_outside_sees_the_run_in_order() -> None:
    """A listener is any callable that takes an event: here, the append of a list."""
    first, *between, last = events_of_a_run()
    assert isinstance(first, RunStarted)
    assert isinstance(last, RunFinished)
    names = [layer.name for layer in first.layers]
    assert len(names) == 2
    layers = [event for event in between if isinstance(event, LayerStarted)]
    assert [(event.sweep, event.layer, type(event)) for event in layers] == [
        (sweep, name, kind) for sweep in range(2) for name in names for kind in (LayerStarted, LayerSolved)
    ]
    steps = [event for event in between if isinstance(event, DistillStep)]
    assert [(event.step, event.steps) for event in steps] == [(1, 3), (2, 3), (3, 3)]
    assert between.index(layers[-1]) < between.index(steps[0])
    assert [type(event).__name__ for event in between[between.index(steps[-1]) + 1 :]] == ["Distilled"]
    assert all(str(event) for event in (first, *layers, *steps))


def test_the_memory_of_a_cpu_is_not_estimated() -> None:
    """There is no peak to compare it with."""
    assert not any(isinstance(event, MemoryEstimated) for event in events_of_a_run())


@pytest.mark.gpu
def test_the_memory_of_a_gpu_is_estimated_before_the_first_layer() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    kinds = [type(event) for event in events_of_a_run(device="cuda")]
    assert kinds.index(MemoryEstimated) < kinds.index(LayerStarted)
