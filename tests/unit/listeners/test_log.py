"""Progress in a log."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from snows.events import (
    Counted,
    DistillStep,
    EpochEnded,
    LayerSolved,
    LayerStarted,
    Retrained,
    RetrainingStarted,
    RunFinished,
    SolveReport,
    TrainingStep,
    Working,
)
from snows.listeners import log
from snows.listeners.log import LogLines

ROOT = Path(__file__).parents[3]
SOLVE = SolveReport(1, 2.0, 1.0, 0.5, "closed form", "converged", 1, 5, 0, "gauss-newton", 1e-6, 0.1)
NOT_SOLVED = SolveReport(0, float("nan"), float("nan"), float("nan"), "masked", "mask only", 0, 0, 0, "", 0.0, 0.0)


@pytest.fixture
def every_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(log, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(log, "_LEAST_SECONDS_OF_STEPS", 0.0)
    monkeypatch.setattr("snows.listeners.base.memory_in_use", lambda: None)
    caplog.set_level(logging.INFO, "snows")
    return caplog


def test_a_line_for_every_layer(every_line: pytest.LogCaptureFixture) -> None:
    with LogLines("starting") as lines:
        lines(LayerStarted(("fc",), 0, 2, 0, 1))
        lines(LayerSolved(("fc",), 0, 2, 0, 1, SOLVE))
        lines(LayerSolved(("fd",), 1, 2, 0, 1, NOT_SOLVED))
        lines(DistillStep(7, 40))
        lines(RunFinished({}, 125.0, 0, None))
    assert every_line.messages[0] == "starting"
    assert re.match(r"sweep 1/1 {2}fc, loss 2 -> 0\.5, 1/2, .*ends about", every_line.messages[1])
    assert re.match(r"sweep 1/1 {2}fd, masked, 2/2", every_line.messages[2])
    assert re.match(r"last stage, all layers together, 7/40", every_line.messages[3])
    assert every_line.messages[4:] == ["finished in 2 minutes"]


def test_other_work(every_line: pytest.LogCaptureFixture) -> None:
    with LogLines("dense", total=2, completed=1) as lines:
        lines.describe("wanda")
        lines.describe("wanda")
        lines.advance()
        lines.print("a line that stays")
    messages = [re.sub(r", (a second|\d+ seconds) in this step", "", m) for m in every_line.messages]
    assert messages[:2] == ["dense", "wanda, 1/2"]
    assert messages[2].startswith("wanda, 2/2")
    assert messages[3:] == ["a line that stays"]


def test_names_cannot_forge_a_line(every_line: pytest.LogCaptureFixture) -> None:
    with LogLines("evil\nfinished in 2 minutes\x1b[2J") as lines:
        lines(LayerStarted(("fc\n\x1b[2J",), 0, 2, 0, 1))
        lines(LayerSolved(("fc\n\x1b[2J",), 0, 2, 0, 1, SOLVE))
    assert all(message.isprintable() for message in every_line.messages)
    assert every_line.messages[0] == r"evil\nfinished in 2 minutes\x1b[2J"
    assert r"fc\n\x1b[2J, loss 2 -> 0.5" in every_line.messages[1]


def test_quick_steps_share_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "snows")
    with LogLines("training", total=1000) as lines:
        for _ in range(1000):
            lines.advance()
    assert caplog.messages == ["training"]


@pytest.mark.parametrize("kind", [DistillStep, Counted, lambda step, steps: TrainingStep(step, steps, 1, 2)])
def test_steps_share_a_line(
    kind: Callable[[int, int], Counted], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_LEAST_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "snows")
    with LogLines("starting") as lines:
        for step in range(1, 101):
            lines(kind(step, 100))
    assert caplog.messages == ["starting"]


def test_a_line_for_every_epoch(every_line: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_LEAST_SECONDS_OF_STEPS", 20.0)
    with LogLines("starting") as lines:
        lines(RetrainingStarted("Net", {"epochs": 2}, None, 64, 8, "top1", 0, "cpu"))
        for epoch in range(3):
            lines(EpochEnded(epoch, 2, 0.1, 1.0, {"top1": 0.5}))
            lines(TrainingStep(epoch + 1, 2, epoch, 2))
        lines(Retrained(125.0))
    assert every_line.messages[1] == "Net, 2 epochs of retraining: 64 samples, on cpu"
    assert [message.split(",")[0] for message in every_line.messages[2:]] == [
        *(f"epoch {epoch}/2: top1 0.5000 on held-out samples" for epoch in range(3)), "finished in 2 minutes",
    ]  # fmt: skip


def test_a_line_for_every_piece_of_other_work(every_line: pytest.LogCaptureFixture) -> None:
    with LogLines("timing") as lines:
        lines(Working("fc, batch 1", 0, 2))
        lines(Working("fc, batch 8", 1, 2, "eager"))
    messages = [re.sub(r", (a second in this step|ends about ).*", "", message) for message in every_line.messages]
    assert messages == ["timing", "fc, batch 1, 0/2", "fc, batch 8, eager, 1/2"]


def test_a_long_step_is_heard_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "snows")
    with LogLines("one long layer", seconds=0.05):
        time.sleep(0.3)
    heard = len(caplog.messages)
    assert 3 <= heard <= 7
    assert all(message.startswith("one long layer") for message in caplog.messages)
    time.sleep(0.2)
    assert len(caplog.messages) == heard  # closed


SCRIPT = """
import logging, sys
if "configured" in sys.argv:
    logging.basicConfig(level=logging.{level}, format="APP %(message)s")
import snows, torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
snows.prune(model, torch.randn(64, 8), "2:4", layers="0")
logging.getLogger("snows").info("after")
"""


def lines_of(*words: str, level: str = "INFO") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(level=level), *words],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_a_plain_script_shows_lines_and_its_logging_stays_as_it_was() -> None:
    lines = lines_of()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines), lines
    assert "Sequential to 2:4: 1 layer, 64 samples, on cpu" in lines[1]
    assert "finished in " in lines[-1]


def test_a_program_that_configured_logging_decides() -> None:
    lines = lines_of("configured")
    assert all(line.startswith("APP ") for line in lines)
    assert lines[-1] == "APP after"
    assert len(lines) >= 4
    assert lines_of("configured", level="WARNING") == []
