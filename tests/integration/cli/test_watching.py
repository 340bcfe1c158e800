"""Flags that name listeners."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from snows.cli.watching import listeners_of

from ..conftest import Snows, assert_error
from .helpers import PRUNE


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_events_tensorboard_and_live_page(run: Snows, tmp_path: Path) -> None:
    events, board, out = tmp_path / "events.jsonl", tmp_path / "board", tmp_path / "made" / "out"
    done = run(*PRUNE, "--out", out, "--events", events, "--tensorboard", board, "--live")
    assert done.status == 0, done.err
    lines = [json.loads(line)["event"] for line in events.read_text().splitlines()]
    assert (lines[0], lines[-1], lines.count("LayerSolved")) == ("RunStarted", "RunFinished", 2)
    assert len(list(board.iterdir())) == 1
    live = tmp_path / "made" / "out-live.html"
    assert f"open in a browser to follow the run: {live.as_uri()}\n" in done.err
    assert "ot finished" not in live.read_text()


def test_events_are_written_in_silence_too(run: Snows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path.cwd())
    done = run(*PRUNE, "--quiet", "--live", "--events", tmp_path / "events.jsonl")
    assert (done.status, done.out, done.err) == (0, "", "")
    assert Path("snows-live.html").is_file()
    assert (tmp_path / "events.jsonl").read_text().count("LayerSolved") == 2


def test_the_live_page_of_the_working_directory_is_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    listeners_of(None, None, True, Path("."), quiet=True)
    assert (tmp_path / "here-live.html").is_file()


def test_a_wrong_path_is_refused_before_any_work(run: Snows, tmp_path: Path) -> None:
    refused = run("prune", "missing.py:model", "--events", tmp_path / "missing" / "events.jsonl")
    assert_error(refused, 1, "cannot write to")
