"""`snows retrain` on the command line."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from snows.results.manifest import recorded_source
from tests.integration.cli.helpers import DATA, FILES, MODEL
from tests.unit.cli.test_commands import call

TRAINING = ("--model", "net.py:model", "--epochs", "2", "--batch", "16", "--lr", "0.01", "--held-out", "0.25")


@pytest.fixture(scope="module", autouse=True)
def pruned(place: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert call(*MODEL, *DATA, "--recipe", "fast.json", "--out", "pruned", "--quiet") == 0


def test_labels(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("retrain", "pruned", *TRAINING, "--data", "net.py:pairs_of_classes")
    assert call(*words, "--out", "labels") == 0
    said, complaints = capsys.readouterr()
    assert complaints == ""
    assert "12 held-out samples: top-1 " in said
    assert "kept are the weights of" in said
    assert {path.name for path in Path("labels").iterdir()} == FILES
    assert call("verify", "labels", "--model", "net.py:model", "--quiet") == 0
    assert call(*words, "--out", "labels") == 1
    assert "labels exists and is not empty" in capsys.readouterr().err


def test_a_teacher_and_resume(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("retrain", "pruned", *TRAINING, "--data", "net.py:labelled", "--teacher", "net.py:model", "--json")
    for out in ("first", "second"):
        assert call(*words, "--resume", "epochs", "--out", out) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["retraining"]["teacher"] == "Sequential"
        assert report["retraining"]["recalled_epochs"] == {"first": 0, "second": 2}[out]
        assert [row["network"] for row in report["evaluation"]] == ["dense", "pruned", "retrained"]
    assert Path("first/model.safetensors").read_bytes() == Path("second/model.safetensors").read_bytes()
    assert recorded_source(Path("first")) == "net.py:model"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_events_tensorboard_and_live_page(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("retrain", "pruned", *TRAINING, "--data", "net.py:pairs_of_classes", "--out", "watched")
    assert call(*words, "--events", "epochs.jsonl", "--tensorboard", "board", "--live") == 0
    kinds = [json.loads(line)["event"] for line in Path("epochs.jsonl").read_text().splitlines()]
    assert (kinds[0], kinds.count("EpochEnded"), kinds[-1]) == ("RetrainingStarted", 3, "Retrained")
    assert len(list(Path("board").iterdir())) == 1
    page = Path("watched-live.html")
    assert page.resolve().as_uri() in capsys.readouterr().err
    text = page.read_text()
    assert "Retraining with frozen masks" in text
    assert "2:4" in text  # what was pruned, too
    assert "ot finished" not in text


def test_held_out_data_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("retrain", "pruned", *TRAINING[:-2], "--data", "net.py:class_loader", "--out", "loader", "--quiet")
    assert call(*words) == 2
    assert "from which no share can be held out" in capsys.readouterr().err
    assert call(*words, "--held-out", "net.py:pairs_of_classes") == 0


def test_an_output_folder_is_tried_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("snows.training.retraining.retrain", lambda *_, **__: pytest.fail("the work began"))
    (tmp_path / "file").write_text("mine")
    state = tmp_path / "state"
    words = ("retrain", "pruned", *TRAINING, "--data", "net.py:pairs_of_classes", "--resume", str(state))
    for out, sentence in (
        (tmp_path / "file" / "out", "file is no folder"),
        (tmp_path / ("x" * 260), "File name too long"),
        (state, "where finished work is kept"),
    ):
        assert call(*words, "--out", str(out)) == 1
        assert sentence in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_result_is_not_lost_where_its_folder_was_taken_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from snows.training import retraining

    run = retraining.retrain

    def and_take_the_folder(*given: Any, **options: Any) -> Any:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine.txt").write_text("mine")
        return run(*given, **options)

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(retraining, "retrain", and_take_the_folder)
    words = ("retrain", "pruned", *TRAINING, "--data", "net.py:pairs_of_classes", "--quiet")
    assert call(*words, "--out", str(tmp_path / "out")) == 1
    place = capsys.readouterr().err.rpartition(" is in ")[2].strip()
    assert call("verify", place, "--model", "net.py:model", "--quiet") == 0
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("status", "words", "options"),
    [
        (1, "there is no folder nowhere", ("nowhere",)),
        (2, "epochs is 0; expected a whole number", ("pruned", "--epochs", "0")),
        (2, "--teacher-weights is given without --teacher", ("pruned", "--teacher-weights", "w.pt")),
        (2, "--data is needed", ("pruned",)),
        (2, "data 'much' is not known", ("pruned", "--data", "net.py:pairs_of_classes", "--held-out", "much")),
        (1, "labels are needed", ("pruned", "--data", "net.py:calibration")),
        (1, "code that a folder names is not run", ("pruned", "--model-is-left-out",)),
    ],
)  # fmt: skip
def test_bad_input(status: int, words: str, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    model = () if "--model-is-left-out" in options else TRAINING[:2]
    options = tuple(option for option in options if option != "--model-is-left-out")
    assert call("retrain", *options, *model, "--out", "bad") == status
    assert words in capsys.readouterr().err
    assert not Path("bad").exists()
