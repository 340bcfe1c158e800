"""Finished layers in a folder: what is kept comes back exactly, and damage is noticed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import snows
from snows.events import SolveReport
from snows.masks import Choice
from snows.results.journal import DiskJournal, Journal, count_solves, open_journal
from snows.solve.layer import SolvedLayer

CPU = torch.device("cpu")
SETTINGS = {"pattern": "2:4", "seed": 0}


def solved(number: int) -> SolvedLayer:
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    report = SolveReport(0, math.nan, 2.0, 1.0 + number, "start", "converged", 1, 3, 0, "gauss-newton", 1e-6, 0.5)
    way = {
        "held_out_tried": {"masked weights": math.inf, "solved": 1.0},
        "losses": (2.0, 1.0),
        "cg_residuals": ((0.5,),),
    }
    report = dataclasses.replace(report, **way)
    return SolvedLayer({"a.weight": weight, "a.bias": weight[0]}, {"a.weight": weight > 0}, report)


def equal(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


def journal(folder: Path, settings: dict[str, Any] = SETTINGS) -> DiskJournal:
    return DiskJournal(folder / "run", settings, CPU)


def filled(folder: Path) -> DiskJournal:
    first = journal(folder)
    for sweep in range(2):
        first.record_choice(sweep, Choice(solved(9).masks, solved(9).weights))
        for index in range(3):
            first.record(sweep, index, solved(10 * sweep + index))
    return first


def test_a_journal_without_a_folder_keeps_nothing() -> None:
    nothing = open_journal(None, lambda: pytest.fail("digests are not needed"), CPU)
    assert type(nothing) is Journal
    nothing.record(0, 0, solved(0))
    nothing.record_choice(0, Choice({}))
    assert (nothing.recall(0, 0), nothing.recall_choice(0), nothing.recalled) == (None, None, 0)


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    filled(tmp_path)
    again = open_journal(str(tmp_path / "run"), lambda: SETTINGS, CPU)
    for sweep in range(2):
        choice = again.recall_choice(sweep)
        assert choice is not None
        assert equal(choice.masks, solved(9).masks)
        assert equal(choice.weights, solved(9).weights)
        for index in range(3):
            found, wanted = again.recall(sweep, index), solved(10 * sweep + index)
            assert found is not None
            assert equal(found.weights, wanted.weights)
            assert equal(found.masks, wanted.masks)
            assert math.isnan(found.solve.loss_masked)
            assert found.solve.loss == wanted.solve.loss
            assert found.masks["a.weight"].dtype == torch.bool
    assert again.recalled == 6


def test_the_number_of_finished_layers(tmp_path: Path) -> None:
    run = journal(tmp_path)
    assert count_solves(tmp_path / "run") == 0
    run.record_choice(0, Choice(solved(0).masks))
    assert count_solves(tmp_path / "run") == 0
    for index in range(3):
        run.record(0, index, solved(index))
        assert count_solves(tmp_path / "run") == index + 1
    run.record(0, 2, solved(7))  # again: it replaces the first one
    run.record(1, 0, solved(3))
    assert count_solves(tmp_path / "run") == 4
    assert count_solves(tmp_path / "nowhere") == 0


def test_nothing_after_a_gap_is_used(tmp_path: Path) -> None:
    next((filled(tmp_path).folder.path / "layers").glob("sweep00-layer0001-*")).unlink()
    again = journal(tmp_path)
    assert again.recall(0, 0) is not None
    assert again.recall(0, 1) is None
    assert again.recall(0, 2) is None
    assert again.recall_choice(1) is None
    assert again.recalled == 1


@pytest.mark.parametrize("place", ["first byte", "last byte", "cut"])
def test_damage_is_one_warning(place: str, tmp_path: Path) -> None:
    file = next((filled(tmp_path).folder.path / "layers").glob("sweep00-layer0000-*"))
    data = bytearray(file.read_bytes())
    if place == "cut":
        del data[100:]
    else:
        data[0 if place == "first byte" else -1] ^= 1
    file.write_bytes(data)
    again = journal(tmp_path)
    with pytest.warns(
        snows.SnowsWarning, match=r"layer0000-\w+\.safetensors is damaged \(.*\); it is done again"
    ) as told:
        assert again.recall(0, 0) is None
    assert len(told) == 1
    assert again.recall(0, 1) is None  # without another warning
    again.record(0, 0, solved(0))
    found = journal(tmp_path).recall(0, 0)
    assert found is not None
    assert equal(found.weights, solved(0).weights)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    with pytest.raises(snows.InputError, match=r"run was made with other settings \(seed was 0 and is 1\)"):
        journal(tmp_path, {**SETTINGS, "seed": 1})


def test_the_same_layer_is_the_same_file(tmp_path: Path) -> None:
    for number in range(5):
        journal(tmp_path / str(number)).record(0, 0, solved(0))
    files = [next((tmp_path / str(number) / "run" / "layers").iterdir()) for number in range(5)]
    assert len({file.name for file in files}) == len({file.read_bytes() for file in files}) == 1


@pytest.mark.parametrize(
    "places",
    [
        ("sweep00-layer0000", "sweep00-layer0001"),
        ("sweep00-layer0002", "sweep01-layer0002"),
        ("sweep00-start", "sweep01-start"),
    ],
)
def test_exchanged_files_are_noticed(tmp_path: Path, places: tuple[str, str]) -> None:
    """Each is whole, and holds another layer than the one it is named after."""
    folder = filled(tmp_path).folder.path / "layers"
    one, two = (next(folder.glob(f"{place}-*")) for place in places)
    other_name = folder / two.name.replace(places[1], places[0])
    two.rename(folder / one.name.replace(places[0], places[1]))
    one.rename(other_name)
    again = journal(tmp_path)
    sweep, _, index = places[0].removeprefix("sweep").partition("-layer")
    with pytest.warns(snows.SnowsWarning, match="not what was written for this layer of this run"):
        assert (again.recall(int(sweep), int(index)) if index else again.recall_choice(0)) is None


def test_a_layer_of_another_run_is_noticed(tmp_path: Path) -> None:
    filled(tmp_path / "one")
    other = journal(tmp_path / "two", {**SETTINGS, "seed": 1})
    file = next((tmp_path / "one" / "run" / "layers").glob("sweep00-layer0000-*"))
    file.rename(other.folder.path / "layers" / file.name)
    with pytest.warns(snows.SnowsWarning, match="of this run"):
        assert other.recall(0, 0) is None


def test_what_is_no_file_is_refused_before_any_work(tmp_path: Path) -> None:
    (filled(tmp_path).folder.path / "layers" / "sweep02-layer0000").mkdir()
    with pytest.raises(snows.InputError, match="sweep02-layer0000 is no regular file"):
        journal(tmp_path)
