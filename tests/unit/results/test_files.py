"""Folders that are written whole: what is tried before the work, and what a kill leaves."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from snows.errors import InputError
from snows.listeners import TensorBoard
from snows.results.files import (
    CannotWriteError,
    check_writable,
    mend,
    new_folder,
    next_to,
    rescued,
    write_or_rescue,
)
from snows.results.folder import Folder
from tests.users import ROOT, as_ordinary_user


def kept(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for place in (tmp_path / "out", tmp_path / "a" / "b" / "out", tmp_path / "there"):
        check_writable(place)
    assert kept(tmp_path) == ["there"]


DEEP = Path("a/" * (sys.getrecursionlimit() + 100))  # more folders in each other than Path.mkdir makes


@pytest.mark.parametrize(
    "use", [check_writable, lambda place: Folder(place, {}).begin("cells"), lambda place: TensorBoard(place).close()]
)
def test_a_thousand_folders_in_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        use(DEEP)
        assert use is check_writable or DEEP.is_dir()
    finally:
        for folder in (DEEP / "cells", DEEP, *DEEP.parents[:-1]):  # shutil.rmtree gives up, too
            for path in folder.glob("*") if folder.is_dir() else ():
                path.unlink()
            if folder.is_dir():
                folder.rmdir()
    assert kept(tmp_path) == []


def make_bad_place(tmp_path: Path, kind: str) -> Path:
    if kind == "a parent that is a file":
        (tmp_path / "file").write_text("mine")
        return tmp_path / "file" / "out"
    if kind == "a name that is too long":
        return tmp_path / ("x" * 250)
    if kind == "a loop of links":
        (tmp_path / "out").symlink_to(tmp_path / "out")
        return tmp_path / "out"
    if kind == "a loop of links on the way":
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        return tmp_path / "loop" / "out"
    return {"a mount point": Path("/"), "a file system of the kernel": Path("/proc/out")}[kind]


BAD_PLACES = {
    "a parent that is a file": "file is no folder$",
    "a name that is too long": "File name too long",
    "a loop of links": "Too many levels of symbolic links",
    "a loop of links on the way": "Too many levels of symbolic links",
    "a mount point": "it is a mount point; choose a folder inside of it",
    "a file system of the kernel": "No such file or directory|Permission denied|Operation not permitted",
}


@pytest.mark.parametrize("kind", BAD_PLACES)
def test_a_place_that_cannot_be_written_is_refused_first(tmp_path: Path, kind: str) -> None:
    place = make_bad_place(tmp_path, kind)
    before = kept(tmp_path)
    with pytest.raises(InputError, match=BAD_PLACES[kind]):
        check_writable(place)
    assert kept(tmp_path) == before


def test_a_folder_without_permission_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    code = """
from pathlib import Path
from snows.errors import InputError
from snows.results.files import check_writable
for place in ("closed/out", "closed/a/out"):
    try:
        check_writable(Path(place))
    except InputError as error:
        print(error)
"""
    shown = as_ordinary_user(code, tmp_path).splitlines()
    assert shown == [f"cannot write to closed/{name}: Permission denied" for name in ("out", "a/out")]


def test_another_users_folder_in_a_sticky_one_is_refused_first(tmp_path: Path) -> None:
    if not ROOT:
        pytest.skip("only root can make folders for others")
    sticky = tmp_path / "sticky"
    sticky.mkdir()
    sticky.chmod(0o1777)
    (sticky / "out").mkdir(mode=0o777)
    code = """
from pathlib import Path
from snows.errors import InputError
from snows.results.files import check_writable
try:
    check_writable(Path("sticky/out"))
except InputError as error:
    print(error)
"""
    assert as_ordinary_user(code, tmp_path) == "cannot write to sticky/out: it belongs to another user\n"


# Kills


KILLED = """
import os, sys
from pathlib import Path
from snows.results.files import new_folder
rename, calls = os.replace, []
def die(*paths):
    rename(*paths)
    calls.append(paths)
    if len(calls) == 1:
        os._exit(9)
os.replace = die
with new_folder(Path("out")) as folder:
    (folder / "new.txt").write_text("new")
"""


def test_a_kill_between_two_renames_is_mended(tmp_path: Path) -> None:
    import snows

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.txt").write_text("old")
    environment = {"PYTHONPATH": str(Path(snows.__file__).parents[1])}
    ended = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, env=environment, check=False)
    assert ended.returncode == 9
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.iterdir())) == 2  # both versions, under hidden names
    mend(tmp_path / "out")
    assert kept(tmp_path) == ["out", "out/new.txt"]


def test_the_old_folder_comes_back_if_there_is_no_other(tmp_path: Path) -> None:
    (tmp_path / ".out-abcd1234-old").mkdir()
    (tmp_path / ".out-abcd1234-old" / "old.txt").write_text("old")
    mend(tmp_path / "out")
    assert kept(tmp_path) == ["out", "out/old.txt"]


def test_what_was_replaced_is_not_mended_where_a_kill_left_a_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # as if killed then
    for text in ("old", "new"):
        with new_folder(tmp_path / "out") as folder:
            (folder / "text.txt").write_text(text)
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    mend(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "elsewhere" / "text.txt").read_text() == "new"


def test_only_what_is_ours_is_mended(tmp_path: Path) -> None:
    for name in (".other-abcd1234-old", ".out-abcd1234", "out-old", ".out-v2-abcd1234-old", ".out-v2-abcd1234"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content.txt").write_text(name)
    (tmp_path / ".out-wxyz1234-old").mkdir()  # empty, as a trial that was killed leaves it
    (tmp_path / ".out-file1234-old").write_text("no folder")
    before = kept(tmp_path)
    mend(tmp_path / "out")
    mend(tmp_path / "nowhere" / "out")
    assert kept(tmp_path) == before


def test_names_that_cannot_be_changed_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / ".out-abcd1234-old").mkdir()
    (tmp_path / ".out-abcd1234-old" / "old.txt").write_text("old")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(InputError, match=r"saving it was interrupted, and its content is in .*\.out-abcd1234-old"):
        mend(tmp_path / "out")


# What is written meanwhile, and what cannot be written


def test_what_another_wrote_meanwhile_is_kept(tmp_path: Path) -> None:
    def write() -> None:
        with new_folder(tmp_path / "out") as folder:
            (folder / "new.txt").write_text("new")
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "mine.txt").write_text("mine")

    with pytest.raises(CannotWriteError, match="something else was written there meanwhile"):
        write()
    assert kept(tmp_path) == ["out", "out/mine.txt"]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_what_cannot_be_written_is_elsewhere(tmp_path: Path, temporary: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write .*; what was to be written is in (.*)$") as caught:
        write_or_rescue(tmp_path / "nowhere" / "found.json", b"{}")
    place = Path(str(caught.value).rpartition(" is in ")[2])
    assert place.parent == temporary
    assert (place / "found.json").read_bytes() == b"{}"


def test_the_first_error_stays_if_nothing_can_be_rescued(temporary: Path) -> None:
    def full(folder: Path) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    first = InputError("cannot write to out: it is read-only")
    assert rescued(first, full) is first
    assert kept(temporary) == []
    temporary.rmdir()
    assert rescued(first, lambda folder: None) is first


def test_a_name_next_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "last").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "runs" / "last")
    assert next_to(Path("sparse"), "-onnx") == Path("sparse-onnx")
    assert next_to(Path("."), "-onnx") == tmp_path / "runs" / "last-onnx"
    assert next_to(Path(".."), "-onnx") == tmp_path / "runs-onnx"
    assert next_to(Path("/"), "-onnx") == Path("/-onnx")
