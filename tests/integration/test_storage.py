"""Saved results: plain files, the same bytes every time, and nothing half-written."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import snows
from snows import InputError
from tests.networks import example, make
from tests.saved import FILES, SAMPLES, check_folder, contents, quick, strict


@pytest.fixture(scope="module")
def result() -> snows.Result:
    return quick(make("mlp"), example("mlp", SAMPLES))


# Bytes


@pytest.mark.parametrize("compact", [False, True])
def test_the_same_result_is_saved_in_the_same_bytes(compact: bool, result: snows.Result, tmp_path: Path) -> None:
    """Also the headers of safetensors files: they hold metadata, whose order is random if nobody sorts it."""
    first = {path.name: data for path, data in contents(result.save(tmp_path / "0", compact=compact)).items()}
    assert len(first) == len(FILES)
    for number in range(1, 6):
        folder = result.save(tmp_path / str(number), compact=compact)
        assert {path.name: data for path, data in contents(folder).items()} == first


# Reports


@pytest.mark.parametrize("mask", ["magnitude", "wanda"])
def test_reports_of_masks_alone_are_strict_json(mask: str, tmp_path: Path) -> None:
    """A layer that was never solved has no losses: null, since JSON has no NaN."""
    pruned = quick(make("mlp"), example("mlp", SAMPLES), mask=mask, solver=None)
    check_folder(pruned.save(tmp_path / "out"), pruned)
    layer = strict(pruned.report.to_json())["layers"][0]
    assert layer["horizon"] is None
    assert all(solve["loss"] is None for solve in layer["solves"])
    assert ">nan<" not in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_figures_that_are_not_finite_are_null(result: snows.Result) -> None:
    from dataclasses import replace

    report = replace(result.report, evaluation=[{"network": "dense", "kl": float("inf"), "top1": 0.5}])
    assert strict(report.to_json())["evaluation"] == [{"network": "dense", "kl": None, "top1": 0.5}]


class Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_shows_names_as_they_are(tmp_path: Path) -> None:
    name = "<img onerror=alert(1)></script>&amp"
    model = nn.Sequential()
    model.add_module("first", nn.Linear(4, 4))
    model.add_module(name, nn.Linear(4, 4))
    model.add_module("last", nn.Linear(4, 2))
    pruned = quick(model.eval(), torch.randn(SAMPLES, 4))
    assert [layer.name for layer in pruned.report.layers] == [name]
    pruned.report.evaluation = [{"network": "<img>dense", "top1": 0.5}]
    pruned.report.warnings.append("<img>odd")
    page = Text()
    page.feed((pruned.save(tmp_path / "out") / "report.html").read_text(encoding="utf-8"))
    assert {name, "<img>dense", "<img>odd"} <= set(page.text)
    assert "img" not in page.tags
    assert {"first", "last"} <= set(page.text)  # and the layers left dense
    check_folder(tmp_path / "out", pruned)


# Folders


def test_a_new_folder_below_new_folders(result: snows.Result, tmp_path: Path) -> None:
    folder = result.save(str(tmp_path / "a" / "b" / "out"))
    assert folder == tmp_path / "a" / "b" / "out"
    assert [path.name for path in folder.parent.iterdir()] == ["out"]
    assert stat.S_IMODE(folder.stat().st_mode) & 0o700 == 0o700


def test_an_empty_folder_is_taken(result: snows.Result, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    result.save(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["folder", "file", "result"])
def test_what_exists_is_refused_and_left_as_it_was(kind: str, result: snows.Result, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "folder":
        out.mkdir()
        (out / "note.txt").write_text("mine")
    else:
        result.save(out)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    what = "is no folder" if kind == "file" else "exists and is not empty"
    with pytest.raises(InputError, match=rf"out {what}; choose another folder or remove it first$"):
        result.save(out)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("step", ["save_file", "render"])
@pytest.mark.parametrize("there", [False, True])
def test_a_failure_leaves_nothing_behind(
    step: str, there: bool, result: snows.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("snows.data.weights.save_file" if step == "save_file" else "snows.results.result.render", full)
    if there:
        (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match=r"^cannot write to .*out: No space left on device$"):
        result.save(tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == (["out"] if there else [])


def check_rescued(message: str) -> None:
    """The error says where the result is instead, and it is there."""
    _, words, place = message.partition("; what was to be written is in ")
    assert words
    assert snows.load(place, make("mlp")) is not None
    assert snows.verify(place, make("mlp")).ok
    shutil.rmtree(place)


STEPS = ["os.replace", "os.fsync", "pathlib.Path.write_text", "tempfile.mkdtemp"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("there", ["nothing", "empty", "result"])
def test_a_full_disk_leaves_the_old_state(
    step: str,
    there: str,
    result: snows.Result,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    if there == "empty":
        (tmp_path / "out").mkdir()
    elif there == "result":
        result.save(tmp_path / "out")
    before = contents(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("elsewhere")))
    monkeypatch.setattr(step, full)
    with pytest.raises(InputError, match=r"^cannot write to .*: No space left on device") as caught:
        result.save(tmp_path / "out", compact=True, force=True)
    monkeypatch.undo()
    assert contents(tmp_path) == before
    if step == "os.replace":  # the only step that writing elsewhere does without
        check_rescued(str(caught.value))


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_a_failure_between_two_renames_puts_the_old_folder_back(
    kind: type[BaseException], result: snows.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rename, calls = result.save(tmp_path / "out"), os.replace, []

    def second_fails(*paths: Any) -> None:
        calls.append(paths)
        if len(calls) == 2:
            raise kind(errno.EACCES, "Permission denied")
        rename(*paths)

    before = contents(tmp_path)
    monkeypatch.setattr(os, "replace", second_fails)
    with pytest.raises(InputError if kind is OSError else kind):
        result.save(folder, compact=True, force=True)
    assert len(calls) == 3
    assert contents(tmp_path) == before


def test_everything_is_on_the_disk_before_it_takes_its_name(
    result: snows.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, sync, events = os.replace, os.fsync, []

    def record_rename(old: Path, new: Path) -> None:
        events.append("rename")
        rename(old, new)

    def record_sync(handle: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        sync(handle)

    if not Path("/proc/self/fd").exists():
        pytest.skip("the names of open files are not known here")
    monkeypatch.setattr(os, "replace", record_rename)
    monkeypatch.setattr(os, "fsync", record_sync)
    result.save(tmp_path / "out")
    assert set(events[:7]) == FILES
    assert events[7].startswith(".out-")
    assert events[8:] == ["rename", tmp_path.name]


# Replacing


@pytest.mark.parametrize("older", ["same", "compact", "damaged", "behind a link"])
def test_force_replaces_a_result(older: str, result: snows.Result, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result.save(out, compact=older == "compact")
    if older == "damaged":
        (out / "report.json").write_text("{")
        (out / "model.safetensors").unlink()
    elif older == "behind a link":
        out.rename(tmp_path / "real")
        out.symlink_to(tmp_path / "real", target_is_directory=True)
    other = quick(make("conv-bn"), example("conv-bn", SAMPLES))
    assert other.save(out, force=True) == out
    check_folder(out, other)
    assert sorted(path.name for path in tmp_path.iterdir()) == (["out", "real"] if out.is_symlink() else ["out"])
    assert out.is_symlink() == (older == "behind a link")


def test_force_takes_a_new_folder(result: snows.Result, tmp_path: Path) -> None:
    check_folder(result.save(tmp_path / "out", force=True), result)


NOT_OURS = r"has no whole manifest of snows, so nothing says which files may be replaced"
FOREIGN = {
    "file": "is no folder",
    "folder": NOT_OURS,
    "json": NOT_OURS,
    "another manifest": NOT_OURS,
    "no manifest": NOT_OURS,
    "damaged manifest": NOT_OURS,
    "a folder named as a file of ours": r"holds more than a result of snows \(report\.html\), which would be lost",
    "a link named as a file of ours": r"holds more than a result of snows \(report\.html\), which would be lost",
    "a file that is not in the manifest": r"holds more than a result of snows \(model\.compact\.safetensors\), which",
    "more": r"holds more than a result of snows \(checkpoints, note\.txt\), which would be lost",
}


def replace_one_file(out: Path, kind: str) -> None:
    """Something of the user's, by a name that snows uses."""
    if kind == "a file that is not in the manifest":
        (out / "model.compact.safetensors").write_text("mine")
        return
    (out / "report.html").unlink()
    if kind.startswith("a folder"):
        (out / "report.html").mkdir()
        (out / "report.html" / "thesis.txt").write_text("mine")
    else:
        (out / "report.html").symlink_to(out / "recipe.json")


@pytest.mark.parametrize("kind", FOREIGN)
def test_force_refuses_what_is_not_ours(kind: str, result: snows.Result, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind.startswith("a "):
        replace_one_file(result.save(out), kind)
    elif kind == "no manifest":
        (result.save(out) / "manifest.json").unlink()
    elif kind == "damaged manifest":
        (result.save(out) / "manifest.json").write_text("{}")
    elif kind == "more":
        result.save(out)
        (out / "checkpoints").mkdir()
        (out / "note.txt").write_text("mine")
    else:
        out.mkdir()
        name = {"json": "report.json", "another manifest": "manifest.json"}.get(kind, "note.txt")
        (out / name).write_text('{"schema": 1, "layers": [], "files": {}}')
    before = contents(tmp_path)
    with pytest.raises(InputError, match=rf"out {FOREIGN[kind]}.*; choose another folder or remove it first$"):
        result.save(out, force=True)
    assert contents(tmp_path) == before


USES = {
    "load": lambda out, result: snows.load(out, make("mlp")),
    "load_masks": lambda out, result: snows.load_masks(out),
    "verify": lambda out, result: snows.verify(out, make("mlp")),
    "save": lambda out, result: result.save(out, force=True),
}


@pytest.mark.parametrize("use", USES)
def test_a_replacement_that_was_killed_between_its_renames_is_finished(
    use: str, result: snows.Result, tmp_path: Path
) -> None:
    """Both versions are there, under hidden names; the new one is whole."""
    old, new = result.save(tmp_path / "old"), result.save(tmp_path / "new", compact=True)
    old.rename(tmp_path / ".out-k2j4x9_a-old")
    new.rename(tmp_path / ".out-k2j4x9_a")
    USES[use](tmp_path / "out", result)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert snows.verify(tmp_path / "out", make("mlp")).ok
    assert (tmp_path / "out" / "model.compact.safetensors").exists() == (use != "save")


# Masks and compact files as inputs


@pytest.mark.parametrize("file", ["masks.safetensors", "old.safetensors", "model.compact.safetensors"])
def test_masks_are_read_from_saved_files(file: str, result: snows.Result, tmp_path: Path) -> None:
    folder = result.save(tmp_path / "out", compact=True)
    save_file(result.masks, folder / "old.safetensors")  # one byte for each weight, as they were
    again = quick(make("mlp"), example("mlp", SAMPLES), None, mask=folder / file)
    assert again.masks.keys() == result.masks.keys()
    assert all(torch.equal(again.masks[name], mask) for name, mask in result.masks.items())
    torch.testing.assert_close(again.model.state_dict(), result.model.state_dict(), rtol=0, atol=0)


def test_a_result_that_was_changed_after_pruning_is_not_saved(tmp_path: Path) -> None:
    pruned = quick(make("mlp"), example("mlp", SAMPLES))
    with torch.no_grad():
        pruned.model[2].weight.fill_(1)
    with pytest.raises(
        InputError, match=r"^2\.weight is not zero where its mask removes it, so the result was changed"
    ):
        pruned.save(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_parent_that_is_a_file(
    result: snows.Result, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("elsewhere")))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match=r"^cannot write to ") as caught:
        result.save(tmp_path / "file" / "out")
    check_rescued(str(caught.value))
