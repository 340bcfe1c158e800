"""The reader of files from strangers: nothing waits, nothing is larger than was said."""

from __future__ import annotations

import ast
import os
import socket
from pathlib import Path

import pytest

from snows import reading
from snows.errors import InputError
from tests.users import as_ordinary_user


def test_a_regular_file_and_a_link_to_one_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    (tmp_path / "link.json").symlink_to(tmp_path / "a.json")
    assert reading.read_json(tmp_path / "a.json") == reading.read_json(tmp_path / "link.json") == {"a": 1}


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        before = Path.cwd()
        os.chdir(path.parent)  # the path of a socket may be short only
        try:
            server.bind(path.name)
        finally:
            os.chdir(before)


ODD = {
    "a FIFO": make_fifo,
    "a folder": Path.mkdir,
    "a socket": make_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", ODD)
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    ODD[kind](path)
    with pytest.raises(InputError, match=f"x is {kind}; expected a regular file"):
        reading.open_file(path)
    assert not reading.is_file(path)


def test_a_loop_of_links_and_odd_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "loop", tmp_path / ("a" * 300), tmp_path / "a\0b"):
        with pytest.raises(InputError, match="cannot read"):
            reading.open_file(path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert reading.look(tmp_path / "x") is None
    with pytest.raises(InputError, match="there is no file"):
        reading.read_bytes(tmp_path / "x")
    (tmp_path / "x").write_text("")
    with pytest.raises(InputError, match="there is no file"):
        reading.read_bytes(tmp_path / "x" / "y")


def test_more_bytes_than_said_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert reading.read_bytes(path, 5) == b"12345"
    with pytest.raises(InputError, match="more than 4 bytes"):
        reading.read_bytes(path, 4)


def test_text_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with path.open("wb") as stream:
        stream.truncate((16 << 20) + 1)  # holes only
    for read in (reading.read_json, reading.read_text):
        with pytest.raises(InputError, match="has more than 16,777,216 bytes"):
            read(path)


def test_a_file_of_the_system_that_says_it_is_empty_is_bounded() -> None:
    """Files below /proc have a size of 0 and are longer."""
    path = Path("/proc/self/maps")
    if not path.exists():
        pytest.skip("there is no /proc on this system")
    with pytest.raises(InputError, match="more than 100 bytes"):
        reading.read_bytes(path, 100)


def test_json_that_is_no_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text, words in {"[]": "a JSON object", "{": "Expecting", "[" * 100_000: "recursion"}.items():
        path.write_text(text)
        with pytest.raises(InputError, match=f"cannot read .*x.json: .*{words}"):
            reading.read_json(path)


def test_a_small_file_does_not_become_large(tmp_path: Path) -> None:
    path = tmp_path / "x"
    reading.check_unpacked(path, 10, 200 << 20)  # small in any case
    reading.check_unpacked(path, 1 << 30, 50 << 30)
    with pytest.raises(InputError, match="without compression"):
        reading.check_unpacked(path, 1 << 20, 1 << 30)


def test_the_entries_of_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "b").touch()
    (tmp_path / "a").touch()
    assert [path.name for path in reading.entries(tmp_path)] == ["a", "b"]
    with pytest.raises(InputError, match="cannot read"):
        reading.entries(tmp_path / "a")


AS_USER = """
from pathlib import Path
from snows import reading
from snows.errors import InputError
for read, path in (
    (reading.read_json, "closed.json"), (reading.read_json, "closed/x.json"), (reading.is_file, "closed/x.json"),
    (reading.entries, "closed"),
):
    try:
        print("read", read(Path(path)))
    except InputError as error:
        print(error)
"""


def test_what_a_user_may_not_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "closed.json").write_text("{}")
    (tmp_path / "closed.json").chmod(0)
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "x.json").write_text("{}")
    (tmp_path / "closed").chmod(0)
    shown = as_ordinary_user(AS_USER, tmp_path).splitlines()
    (tmp_path / "closed").chmod(0o700)
    paths = ("closed.json", "closed/x.json", "closed/x.json", "closed")
    assert shown == [f"cannot read {path}: Permission denied" for path in paths]


ELSEWHERE = {
    "reading.py": "it is the reader",
    "data/images.py": "Pillow, on what the reader has opened",
    "data/weights.py": "it sorts the header of a file that it has just written",
    "data/embedded/__init__.py": "files of the package",
    "results/files.py": "it flushes what it has just written",
    "results/html.py": "files of the package",
    "results/templates.py": "files of the package",
    "devices/memory.py": "files of the system",
    "devices/usage.py": "files of the system",
    "timing/machine.py": "files of the system",
    "exports/sizes.py": "files that it has just written",
}
READING = {"read_text", "read_bytes", "fromfile", "memmap", "load_file"}


def test_files_are_read_by_the_one_reader() -> None:
    """Whatever else opens a file for reading is named here, with the reason."""
    source = Path(reading.__file__).parent
    found = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _reads(node):
                found.add(path.relative_to(source).as_posix())
    assert found - ELSEWHERE.keys() == set()


def _reads(call: ast.Call) -> bool:
    """Calls of `open` count if they do not say that they write. `read_text(path)` is the reader's own."""
    if isinstance(call.func, ast.Name):
        return call.func.id == "open" and not _writes(call, 1)
    if not isinstance(call.func, ast.Attribute):
        return False
    return call.func.attr in READING or (call.func.attr == "open" and not _writes(call, 0))


def _writes(call: ast.Call, at: int) -> bool:
    """Whether the mode, which is the argument at this place or the one of that name, is for writing."""
    modes = [*call.args[at : at + 1], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    flags = {node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute)}
    named = any(isinstance(mode, ast.Constant) and mode.value in ("w", "wb", "x", "xb") for mode in modes)
    return named or "O_WRONLY" in flags


@pytest.mark.parametrize(
    ("code", "reads"),
    {
        "open(p)": True,
        "open(p, 'rb')": True,
        "open(p, mode='r')": True,
        "p.open()": True,
        "p.open('r+b')": True,
        "p.read_bytes()": True,
        "open(os.devnull, 'w')": False,
        "p.open('w', encoding='utf-8')": False,
        "p.open(mode='wb')": False,
        "os.open(p, os.O_RDONLY)": True,
        "os.open(p, os.O_WRONLY | os.O_CREAT, 0o666)": False,
        "read_bytes(p)": False,
    }.items(),
)
def test_it_is_seen_whether_a_call_reads(code: str, reads: bool) -> None:
    assert [_reads(node) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)] == [reads]
