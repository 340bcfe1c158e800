"""An interrupted run goes on where it was stopped, and ends with the very same weights."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import snows
from snows import Event, Recipe, Result
from snows.cli.tables import print_prune
from snows.errors import InputError, SnowsWarning
from snows.events import LayerSolved
from snows.results.journal import DiskJournal
from snows.solve.layer import SolvedLayer

RECIPE = Recipe(horizon=2, sweeps=2, cg_steps=3)
NETWORK = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()

def data():
    return torch.randn(96, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.zeros(4, 3, 16, 16)
"""


class StopError(Exception):
    """What ends a run from within."""


def network() -> tuple[nn.Module, torch.Tensor]:
    scope: dict[str, Any] = {}
    exec(NETWORK, scope)  # the same network as that of the command line
    return scope["model"](), scope["data"]()[0][:24]


def run(folder: Path | None, progress: bool | Callable[[Event], None] = False, **options: Any) -> Result:
    model, x = network()
    options = {"pattern": "2:4", "recipe": RECIPE, **options}
    return snows.prune(model, x, progress=progress, resume=folder, **options)


def stop_after(layers: int) -> Callable[[Event], None]:
    done = 0

    def tell(event: Event) -> None:
        nonlocal done
        done += isinstance(event, LayerSolved)
        if done == layers:
            raise StopError

    return tell


def same(one: Result, two: Result) -> bool:
    states = zip(one.model.state_dict().values(), two.model.state_dict().values(), strict=True)
    masks = all(torch.equal(mask, two.masks[name]) for name, mask in one.masks.items())
    return masks and all(torch.equal(a, b) for a, b in states)


@pytest.mark.parametrize("mask", ["magnitude", "obc", "woodfisher"])
@pytest.mark.parametrize("sweeps", [2, 3])  # 2:4 at once, and by way of 3:4: then the second sweep has new masks
def test_a_run_stopped_after_any_layer_ends_the_same(mask: str, sweeps: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"mask": mask, "recipe": RECIPE.replace(sweeps=sweeps)}
    whole = run(None, **options)
    layers = len(whole.report.layers) * sweeps
    for stop in range(1, layers, 2):
        folder = tmp_path / str(stop)
        with pytest.raises(StopError):
            run(folder, stop_after(stop), **options)
        resumed = run(folder, **options)
        assert same(resumed, whole)
        assert [[s.loss for s in y.solves] for y in resumed.report.layers] == [
            [s.loss for s in y.solves] for y in whole.report.layers
        ]


@pytest.mark.parametrize("mask", ["magnitude", "obc"])
def test_what_is_recalled_is_laid_out_as_what_was_recorded(
    mask: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums over another layout round otherwise, and a later sweep may choose other masks by that."""
    recorded: list[SolvedLayer] = []
    recalled: list[SolvedLayer | None] = []
    record, recall = DiskJournal.record, DiskJournal.recall

    def see_record(self: DiskJournal, sweep: int, index: int, entry: SolvedLayer) -> None:
        recorded.append(entry)
        record(self, sweep, index, entry)

    def see_recall(self: DiskJournal, sweep: int, index: int) -> SolvedLayer | None:
        recalled.append(recall(self, sweep, index))
        return recalled[-1]

    monkeypatch.setattr(DiskJournal, "record", see_record)
    run(tmp_path / "state", mask=mask)
    monkeypatch.setattr(DiskJournal, "recall", see_recall)
    run(tmp_path / "state", mask=mask)

    assert recorded
    assert len(recalled) == len(recorded)
    for before, after in zip(recorded, recalled, strict=True):
        assert after is not None
        for one, two in ((before.weights, after.weights), (before.masks, after.masks)):
            assert {name: t.stride() for name, t in one.items()} == {name: t.stride() for name, t in two.items()}


def test_what_is_finished_is_not_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(tmp_path / "state")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "state").rglob("*") if file.is_file()}
    again = run(tmp_path / "state")
    assert same(first, again)
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "state").rglob("*") if file.is_file()}
    solves = sum(len(layer.solves) for layer in first.report.layers)
    assert (first.report.recalled_solves, again.report.recalled_solves) == (0, solves)
    for report, said in ((first.report, False), (again.report, True)):
        report.to_html(tmp_path / "report.html")
        assert ("by an earlier call" in (tmp_path / "report.html").read_text()) == said
        print_prune(report, None, as_json=False, quiet=False)
        assert (f"{solves} solves were finished before" in capsys.readouterr().out) == said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pattern": "1:4"}, "pattern was 2:4 and is 1:4"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"mask": "obc"}, "mask was magnitude and is obc"),
        ({"recipe": RECIPE.replace(cg_steps=4)}, "recipe cg steps was 3 and is 4"),
        ({"exclude": "4"}, "exclude was none and is 4"),
    ],
)
def test_a_folder_of_another_run_is_refused_with_the_difference(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(StopError):
        run(tmp_path / "state", stop_after(1))
    with pytest.raises(InputError, match=words):
        run(tmp_path / "state", **options)


def test_another_model_and_other_data_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "state")
    model, x = network()
    with pytest.raises(InputError, match="the calibration samples differ"):
        snows.prune(model, x + 1, "2:4", recipe=RECIPE, resume=tmp_path / "state", progress=False)
    with torch.no_grad():
        model[2].weight += 1
    with pytest.raises(InputError, match="the model's weights differ"):
        snows.prune(model, x, "2:4", recipe=RECIPE, resume=tmp_path / "state", progress=False)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="exists and is not empty"):
        run(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_damaged_files_are_done_again_or_refused(tmp_path: Path) -> None:
    whole = run(None, pattern="1:4", mask="woodfisher")
    chance = random.Random(0)
    run(tmp_path / "state", pattern="1:4", mask="woodfisher")
    names = sorted(file.relative_to(tmp_path / "state") for file in (tmp_path / "state").rglob("*.*"))
    choices = [name for name in names if "start" in name.name]
    assert len(choices) == 2  # of masks, one for each sweep
    for number, name in enumerate([*names[::3], *choices, names[-1]]):  # the last are the settings
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "state", folder)
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: chance.randrange(len(data))] if number % 2 else _flip(data, chance))
        if name.suffix == ".json":
            with pytest.raises(InputError, match=r"cannot read|was made with other settings"):
                run(folder, pattern="1:4", mask="woodfisher")
            continue
        with pytest.warns(SnowsWarning, match="is damaged"):
            assert same(run(folder, pattern="1:4", mask="woodfisher"), whole)


def _flip(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :]


def test_a_full_disk_is_a_sentence_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StopError):
        run(tmp_path / "state", stop_after(3))
    replace = os.replace
    written = 0

    def fill_up(*args: Any) -> None:
        nonlocal written
        written += 1
        if written == 3:
            raise OSError(28, "No space left on device")
        replace(*args)

    monkeypatch.setattr(os, "replace", fill_up)
    with pytest.raises(InputError, match=r"cannot write .*: No space left on device"):
        run(tmp_path / "state")
    monkeypatch.undo()
    assert not [file for file in (tmp_path / "state").rglob(".*") if file.is_file()]
    assert same(run(tmp_path / "state"), run(None))


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_the_same(tmp_path: Path) -> None:
    """SIGKILL at twenty random moments, through the command line."""
    (tmp_path / "net.py").write_text(NETWORK)
    command = [sys.executable, "-m", "snows", "prune", "net.py:model", "--data", "net.py:data", "--pattern", "2:4"]
    command += ["--mask", "obc", "--device", "cpu", "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    subprocess.run([*command, "--out", "whole"], cwd=tmp_path, env=environment, check=True)
    seconds = time.monotonic() - began
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    chance = random.Random(0)
    kills = finished = 0
    while kills < 20:
        resumed = [*command, "--resume", f"state{finished}", "--out", f"out{finished}", "--force"]
        process = subprocess.Popen(resumed, cwd=tmp_path, env=environment)
        try:
            assert process.wait(timeout=chance.uniform(0.3, 1.0) * seconds) == 0
            finished += 1
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
    subprocess.run(resumed, cwd=tmp_path, env=environment, check=True)
    results = [load_file(tmp_path / f"out{number}" / "model.safetensors") for number in range(finished + 1)]
    for result in results:
        assert all(torch.equal(result[name], whole[name]) for name in whole)
