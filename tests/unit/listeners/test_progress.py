"""The progress bar, and listeners of the caller's own."""

from __future__ import annotations

import io
import logging
import re
import sys
from dataclasses import dataclass

import pytest
import torch
from rich.console import Console

import snows
from snows.events import (
    CGStep,
    Counted,
    DistillStep,
    Event,
    LayerSolved,
    LayerStarted,
    MemoryEstimated,
    RunFinished,
    RunStarted,
    SolveReport,
    TimeEstimated,
    Warned,
)
from snows.listeners.base import BEGINNING, Progress
from snows.listeners.log import LogLines
from snows.listeners.progress import ProgressBar, listening, open_progress
from tests.networks import example, make

SOLVE = SolveReport(1, 2.0, 1.0, 0.5, "closed form", "converged", 1, 5, 0, "gauss-newton", 1e-6, 0.1)


def terminal(width: int = 160) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width)


def text(console: Console) -> str:
    """What was written, without the codes that move and color it."""
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def shown_after(*events: Event) -> str:
    """The lines that are on the terminal after these events, one behind the other."""
    return " ".join(lines_after(*events))


def lines_after(*events: Event, width: int = 160) -> list[str]:
    console = terminal(width)
    with ProgressBar("starting", console=console) as bar:
        for event in events:
            bar(event)
        bar._bar.refresh()
        return text(console).split("\r")[-1].splitlines()


def test_it_counts_the_layers_of_all_sweeps() -> None:
    assert re.match(r"starting +━* +0/\?", shown_after())
    assert re.match(r"sweep 2/3 {2}fc \+ fd .* 5/12", shown_after(LayerStarted(("fc", "fd"), 1, 4, 1, 3)))
    assert " 6/12" in shown_after(LayerStarted(("fc",), 1, 4, 1, 3), LayerSolved(("fc",), 1, 4, 1, 3, SOLVE))
    assert re.match("last stage, all layers together .* 7/40", shown_after(DistillStep(7, 40)))


def test_names_are_not_read_as_markup() -> None:
    assert "sweep 1/1  [/red]" in shown_after(LayerStarted(("[/red]",), 0, 1, 0, 1))


def test_names_are_not_obeyed_by_the_terminal() -> None:
    assert r"sweep 1/1  fc\n\x1b]0;owned\x07" in shown_after(LayerStarted(("fc\n\x1b]0;owned\x07",), 0, 1, 0, 1))
    console = terminal()
    with ProgressBar("evil\x1b]0;owned\x07", console=console) as bar:
        bar.print("evil\nfinished\x07")
    assert r"evil\nfinished\x07" in text(console)
    assert "\x07" not in text(console)


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
        bar._bar.refresh()
        assert re.match("wanda\n.* 2/3", text(console).split("\r")[-1])


def test_nothing_is_shown_without_a_terminal_or_if_it_is_not_wanted() -> None:
    for console, shown in ((Console(file=io.StringIO(), force_terminal=False), True), (terminal(), False)):
        with ProgressBar("starting", shown=shown, console=console) as bar:
            bar(LayerStarted(("fc",), 0, 1, 0, 1))
            bar.describe("wanda")
        assert text(console) == ""


class Closing:
    """A listener that must be closed."""

    def __init__(self) -> None:
        self.seen: list[Event] = []
        self.closed = False

    def __call__(self, event: Event) -> None:
        self.seen.append(event)

    def close(self) -> None:
        self.closed = True


def test_what_progress_stands_for(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "snows")
    event = MemoryEstimated(1 << 30)
    with listening(True) as lines, listening(True, "timing"):  # there is no terminal here
        lines(event)
    assert caplog.messages == [BEGINNING, "timing", str(event)]
    with listening(False) as silent:
        silent(event)
    seen: list[Event] = []
    closing = Closing()
    with listening([seen.append, False, closing]) as several:
        several(event)
        assert not closing.closed
    assert seen == closing.seen == [event]
    assert closing.closed
    assert capsys.readouterr() == ("", "")
    wanted = pytest.raises(snows.ArgumentError, match="progress is 'bar'; expected True, False, a callable")
    with wanted, listening("bar"):  # type: ignore[arg-type]
        pass


def test_listeners_are_closed_after_a_failure() -> None:
    closing = Closing()
    with pytest.raises(ZeroDivisionError), listening([closing, True]):
        raise ZeroDivisionError
    assert closing.closed
    with pytest.raises(snows.ArgumentError), listening([closing, 3]):  # type: ignore[list-item]
        pass


def test_the_display_fits_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_progress() as lines, open_progress(shown=False) as hidden:
        assert (type(lines), type(hidden)) == (LogLines, Progress)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    with open_progress() as lines:
        assert type(lines) is LogLines
    monkeypatch.setenv("TERM", "xterm")
    with open_progress() as bar:
        assert type(bar) is ProgressBar


def test_the_bar_survives_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a terminal is closed, everything that is written to it fails."""

    class Closed(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

        def flush(self) -> None:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Closed())
    monkeypatch.setenv("TERM", "xterm")
    with open_progress() as bar:
        assert isinstance(bar, ProgressBar)
        bar.describe("goes on")
        bar._bar.refresh()
        bar.print("and on")


def test_it_shows_conjugate_gradients_the_end_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snows.listeners.base.memory_in_use", lambda: 3 << 29)
    shown = shown_after(TimeEstimated((600.0, 600.0)), LayerStarted(("fc",), 0, 2, 0, 1), CGStep(1, 2, 7, 15))
    assert re.match(
        r"sweep 1/1 {2}fc {2}Newton 1/2, CG 7 .* 0/2 0:00:00 ends about .*, in 20 minutes {2}1\.5 GiB", shown
    )


def test_it_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snows.listeners.base.memory_in_use", lambda: 25 << 29)
    group = tuple(f"vit.encoder.layer.11.attention.attention.{name}" for name in ("query", "key", "value"))
    events = (TimeEstimated((80_000.0,) * 120), LayerStarted(group, 99, 120, 0, 1), CGStep(1, 2, 7, 15))
    what, how_much = lines_after(*events, width=80)
    assert what.startswith("sweep 1/1  vit.encoder.layer.11.attention.attention.query + ")
    assert what.endswith("…")
    assert len(what) <= 80
    assert re.fullmatch(r"[━╺╸]+ +99/120 0:00:00 ends about \w+ \d+:\d+, in [\d.]+ hours {2}12\.5 GiB *", how_much)


def test_an_epoch_counts() -> None:
    @dataclass(frozen=True)
    class Epoch(Counted):
        loss: float

        def __str__(self) -> str:
            return f"epoch, loss {self.loss}"

    assert re.match(r"epoch, loss 0\.5 .* 3/9", shown_after(Epoch(3, 9, 0.5)))


def test_the_bar_is_closed_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError), ProgressBar(console=terminal()) as bar:
        raise ZeroDivisionError
    assert not bar._bar.live.is_started


def events_of_a_run(**options: object) -> list[Event]:
    seen: list[Event] = []
    recipe = snows.Recipe(horizon=1, sweeps=2, cg_steps=2, finish_steps=3)
    snows.prune(make("conv-bn"), example("conv-bn", 32), "2:4", recipe=recipe, progress=seen.append, **options)
    return seen


def test_a_listener_from_outside_sees_the_run_in_order() -> None:
    """A listener is any callable that takes an event: here, the append of a list."""
    first, *between, last = [event for event in events_of_a_run() if not isinstance(event, Warned)]
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
    assert [type(event).__name__ for event in between[between.index(steps[-1]) + 1 :]][:1] == ["Distilled"]
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
