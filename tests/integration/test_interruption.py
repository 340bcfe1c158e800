"""Ctrl-C in a script: soon, with what is kept, and without the frames of the solver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import pytest

import snows
from snows.events import EpochEnded, Event, LayerSolved
from snows.masks.magnitude import Magnitude
from tests.networks import example, make

ROOT, PACKAGE = Path(__file__).parents[2], Path(snows.__file__).parent
RECIPE = snows.Recipe(horizon=1, sweeps=1, cg_steps=2)
NET, SAMPLES = make("conv-bn").requires_grad_(), example("conv-bn", 24)


def pressed(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def stop(event: Event) -> None:
    if isinstance(event, LayerSolved) or (isinstance(event, EpochEnded) and event.epoch == 2):
        raise KeyboardInterrupt


def prune(folder: Path | None) -> None:
    snows.prune(NET, SAMPLES, "2:4", recipe=RECIPE, progress=stop, resume=folder)


def retrain(folder: Path | None) -> None:
    result = snows.prune(NET, SAMPLES, "2:4", solver=None, progress=False)
    snows.retrain(result, SAMPLES, teacher=NET, epochs=3, progress=stop, resume=folder)


def compare(folder: Path | None) -> None:
    class Pressing(Magnitude):
        choose = pressed

    masks = {"magnitude": "magnitude", "pressing": Pressing()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", snows.SnowsWarning)  # there are no test samples
        snows.compare(NET, SAMPLES, "2:4", masks, recipe=RECIPE, progress=False, out=folder)


def sensitivity(folder: Path | None) -> None:
    snows.sensitivity(NET, SAMPLES, 0.5, progress=pressed)


def bench(folder: Path | None) -> None:
    with TemporaryDirectory() as place:
        saved = snows.prune(NET, SAMPLES, "2:4", solver=None, progress=False).save(f"{place}/pruned")
        snows.bench(saved, make("conv-bn"), batches=[1], engines=[], device="cpu", progress=pressed)


@pytest.mark.parametrize(
    ("call", "nothing", "kept"),
    [
        (prune, "nothing was saved; resume=DIR keeps finished layers", "1 layer solve is kept in {}; the same call"),
        (retrain, "nothing was saved; resume=DIR keeps finished epochs", "1 epoch is kept in {}; the same call"),
        (compare, "2 networks finished; out=DIR keeps finished", "2 networks finished and kept in {}; the same call"),
        (sensitivity, "nothing was saved", "nothing was saved"),
        (bench, "nothing was saved", "nothing was saved"),
    ],
)
@pytest.mark.parametrize("keeps", [False, True])
def test_it_says_what_is_kept_without_our_frames(
    keeps: bool, call: Callable[[Path | None], None], nothing: str, kept: str, tmp_path: Path
) -> None:
    folder = tmp_path / "state" if keeps else None
    with pytest.raises(KeyboardInterrupt) as stopped:
        call(folder)
    assert str(stopped.value).startswith(kept.format(folder) if keeps else nothing)
    text = "".join(traceback.format_exception(stopped.value))
    ours = [line for line in text.splitlines() if f'File "{PACKAGE}{os.sep}' in line]
    assert len(ours) == 1, text
    assert f"in {call.__name__}" in ours[0]


SCRIPT = """
import sys, torch, snows
from snows.events import LayerStarted

def listener(event):
    if isinstance(event, LayerStarted):
        print("started", flush=True)

columns, rows, mask = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(columns, rows), torch.nn.ReLU(), torch.nn.Linear(rows, 10)).eval()
snows.prune(model, torch.randn(256, columns), "2:4", layers="0", mask=mask, progress=listener)
print("finished", flush=True)
"""


def seconds_to_end(wait: float, *words: str) -> float:
    """From Ctrl-C, so many seconds after the layer was begun, to the end of the process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert script.stdout is not None
    assert script.stdout.readline() == "started\n"
    time.sleep(wait)
    began = time.monotonic()
    script.send_signal(signal.SIGINT)
    out, err = script.communicate(timeout=60)
    assert out == "", "it had finished before; take a larger layer"
    assert err.strip().endswith("KeyboardInterrupt: nothing was saved; resume=DIR keeps finished layers"), err
    return time.monotonic() - began


def test_a_script_ends_soon() -> None:
    assert seconds_to_end(0.3, "4608", "512", "magnitude") < 5


@pytest.mark.slow
@pytest.mark.parametrize("wait", [1.0, 4.0, 8.0])
def test_a_script_ends_soon_in_a_very_wide_layer(wait: float) -> None:
    assert seconds_to_end(wait, "9216", "512", "magnitude") < 5


@pytest.mark.slow
@pytest.mark.parametrize("wait", [3.0, 9.0])
def test_a_script_ends_soon_in_eigenvectors(wait: float) -> None:
    assert seconds_to_end(wait, "4608", "256", "alps") < 5
