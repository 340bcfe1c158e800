"""What strangers may have made: places that cannot be written, odd files, names that a terminal would obey."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.saved import sealed

from ..conftest import Snows, assert_error
from .helpers import PRUNE

EVIL = "w\x1b]0;owned\x07\x1b[2J"


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snows.api.prune", lambda *_, **__: pytest.fail("the work began"))


def bad_out(folder: Path, kind: str) -> Path:
    (folder / "file").write_text("mine")
    (folder / "loop").symlink_to(folder / "loop")
    return {
        "a parent that is a file": folder / "file" / "out",
        "too long a name": folder / ("x" * 260),
        "a mount point": Path("/proc"),
        "a loop of links": folder / "loop",
        "the resume folder": folder / "state",
        "a parent of the resume folder": folder,
    }[kind]


OUTS = {
    "a parent that is a file": "file is no folder",
    "too long a name": "File name too long",
    "a mount point": "",
    "a loop of links": "Too many levels of symbolic links",
    "the resume folder": "where finished work is kept",
    "a parent of the resume folder": "",
}


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("kind", OUTS)
def test_an_output_folder_is_tried_before_the_work(run: Snows, tmp_path: Path, kind: str) -> None:
    words = (*PRUNE, "--out", bad_out(tmp_path, kind), "--resume", tmp_path / "state")
    before = sorted(tmp_path.rglob("*"))
    assert_error(run(*words), 1, OUTS[kind])
    assert sorted(tmp_path.rglob("*")) == before


def test_a_result_is_not_lost_where_its_folder_was_taken_meanwhile(
    run: Snows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tempfile

    from snows import api

    prune = api.prune

    def and_take_the_folder(*args: object, **options: object) -> object:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "mine.txt").write_text("mine")
        return prune(*args, **options)  # type: ignore[arg-type]

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(api, "prune", and_take_the_folder)
    outcome = run(*PRUNE, "--quiet", "--out", tmp_path / "out")
    assert_error(
        outcome, 1, "exists and is not empty; choose another folder or remove it first; what was to be written"
    )
    place = outcome.err.rpartition(" is in ")[2].strip()
    assert run("verify", place, "--model", "net.py:model").status == 0
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


FILES = {
    "manifest": lambda out: out / "manifest.json",
    "weights": lambda out: out / "model.safetensors",
    "report": lambda out: out / "report.json",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, place: Path) -> Path:
    import snows
    from tests.networks import example, make
    from tests.saved import SAMPLES, quick

    folder: Path = quick(make("mlp"), example("mlp", SAMPLES)).save(tmp_path_factory.mktemp("saved") / "out")
    assert snows.verify(folder, make("mlp")).ok
    return folder


def copied(saved: Path, folder: Path) -> Path:
    (folder / "out").mkdir()
    for path in saved.iterdir():
        (folder / "out" / path.name).write_bytes(path.read_bytes())
    return folder / "out"


@pytest.mark.parametrize("kind", ["FIFO", "device", "folder"])
@pytest.mark.parametrize("file", FILES)
def test_a_result_of_other_things_than_files_is_a_finding(
    run: Snows, saved: Path, tmp_path: Path, kind: str, file: str
) -> None:
    path = FILES[file](copied(saved, tmp_path))
    path.unlink()
    {"FIFO": os.mkfifo, "device": lambda at: at.symlink_to("/dev/zero"), "folder": Path.mkdir}[kind](path)
    outcome = run("verify", tmp_path / "out")
    assert outcome.status == 1
    assert f"{path.name} is a {kind}; expected a regular file" in outcome.out


@pytest.mark.parametrize("flag", ["--config", "--recipe", "--mask", "--weights"])
@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_flags_that_name_no_regular_file(run: Snows, tmp_path: Path, flag: str, kind: str) -> None:
    path = tmp_path / {"--config": "c.toml", "--recipe": "r.json", "--mask": "m.pt", "--weights": "w.safetensors"}[flag]
    {"FIFO": os.mkfifo, "device": lambda at: at.symlink_to("/dev/zero")}[kind](path)
    assert_error(run(*PRUNE[:-2], flag, path), 1, f"is a {kind}; expected a regular file")


def test_a_config_file_is_bounded(run: Snows, tmp_path: Path) -> None:
    """A key of 50,000 parts would take gigabytes."""
    (tmp_path / "c.toml").write_text("a." * 50_000 + "a = 1")
    assert_error(run(*PRUNE, "--config", tmp_path / "c.toml"), 1, "has more than 8,192 bytes")


@pytest.mark.parametrize("text", ["sweeps = 1" + "0" * 400, "ridge = 1e300", "self = 3"])
def test_a_config_of_absurd_choices(run: Snows, tmp_path: Path, text: str) -> None:
    (tmp_path / "c.toml").write_text(f"[recipe]\n{text}")
    assert_error(run(*PRUNE, "--config", tmp_path / "c.toml"), 2, "recipe: ")


def test_an_impossible_pattern_in_a_report_is_a_finding(run: Snows, saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    report = json.loads((folder / "report.json").read_text())
    report["layers"][0]["pattern"] = "5:4"
    (folder / "report.json").write_text(json.dumps(report))
    outcome = run("verify", sealed(folder))
    assert outcome.status == 1
    assert "has an impossible pattern in the report: pattern '5:4'" in outcome.out
    assert outcome.err == ""


def test_escape_codes_do_not_reach_the_terminal(run: Snows, saved: Path, tmp_path: Path) -> None:
    save_file({EVIL: torch.ones(3)}, tmp_path / "w.safetensors")
    np.savez(tmp_path / "x.npz", **{EVIL: np.ones(3)})
    (tmp_path / EVIL).mkdir()
    folder = copied(saved, tmp_path)
    (folder / f"{EVIL}\nout is as it was written").write_text("")
    for words in (
        (*PRUNE, "--weights", tmp_path / "w.safetensors"),
        (*PRUNE, "--mask", tmp_path / "w.safetensors"),
        (*PRUNE[:2], "--data", f"npz:{tmp_path / 'x.npz'}"),
        (*PRUNE[:2], "--data", f"folder:{tmp_path / EVIL}"),
        (*PRUNE, "--config", tmp_path / EVIL),
        ("verify", folder),
    ):
        outcome = run(*words)
        assert (outcome.out + outcome.err).replace("\n", "").isprintable()
        assert r"w\x1b]0;owned\x07" in outcome.out + outcome.err
        assert "out is as it was written" not in outcome.out.splitlines()


def test_tables_show_escape_codes_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    from snows.cli.tables import make_console

    table = Table(title=EVIL)
    table.add_column(EVIL)
    table.add_row(EVIL)
    console = make_console()
    console.print(table)
    console.print(f"left dense: {EVIL}")
    assert capsys.readouterr().out.replace("\n", "").isprintable()
