"""Things that are no files in place of files."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import snows
from snows.cli.request import Request, read_config
from snows.data import weights
from snows.data.layer_lists import read_layer_list
from snows.data.sources import DataConfig, load_data
from snows.patterns.curves import Curves
from snows.reading import read_json
from snows.results import journal, storage

from .targets import all_of
from .world import Case


def make_odd_thing(rng: random.Random, path: Path) -> None:
    """Something else than a file by a file's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or path.exists():
        path.unlink()
    rng.choice(_ODD_THINGS)(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        before = Path.cwd()
        os.chdir(path.parent)
        try:
            server.bind(path.name[-60:])
        finally:
            os.chdir(before)


def _huge(path: Path) -> None:
    """Holes only: it takes no place on the disk."""
    with path.open("wb") as stream:
        stream.truncate(1 << 40)


def _closed(path: Path) -> None:
    path.write_bytes(b"{}")
    path.chmod(0)


_ODD_THINGS: list[Callable[[Path], None]] = [
    os.mkfifo, Path.mkdir, _socket, _huge, _closed, Path.touch,
    lambda path: path.symlink_to(path), lambda path: path.symlink_to(path.with_name("nowhere")),
    *(lambda path, at=at: path.symlink_to(at) for at in (
        "/dev/zero", "/dev/urandom", "/dev/full", "/dev/null", "/dev/stdin", "/proc/self/mem", "/proc/self/maps",
        "/proc/kmsg", "/", "..", ".",
    )),
]  # fmt: skip


def odd_things(case: Case) -> None:
    """In place of any file that is read."""
    case.random.choice(_READERS)(case)


def _read_named(name: str, read: Callable[[Path], Any]) -> Callable[[Case], None]:
    def reader(case: Case) -> None:
        make_odd_thing(case.random, case.folder / name)
        read(case.folder / name)

    return reader


def _read_result(case: Case) -> None:
    files = dict(case.random.choice([case.world.result, case.world.small_result]))
    for name, content in files.items():
        case.write(f"result/{name}", content)
    make_odd_thing(case.random, case.folder / "result" / case.random.choice(sorted(files)))
    all_of(*_uses_of_a_result(case, case.folder / "result"))


def _uses_of_a_result(case: Case, place: Path) -> list[Callable[[], Any]]:
    return [
        lambda: snows.verify(place, case.fresh_model()),
        lambda: snows.load(place, case.fresh_model()),
        lambda: snows.load_masks(place),
        lambda: storage.check_output(place, force=True),
    ]


def _read_journal(case: Case) -> None:
    for name, content in case.world.journal.items():
        case.write(f"resume/{name}", content)
    make_odd_thing(case.random, case.folder / "resume" / case.random.choice(sorted(case.world.journal)))
    found = journal.DiskJournal(case.folder / "resume", case.world.settings, torch.device("cpu"))
    for index in range(4):
        found.recall(0, index)


def _read_images(case: Case) -> None:
    case.write("images/a/0.png", case.world.images[3])
    make_odd_thing(case.random, case.folder / "images" / case.random.choice(["a/1.png", "b/1.jpg", "b"]))
    load_data(f"folder:{case.folder / 'images'}", 4, config=DataConfig(size=8))


def _request(path: Path | None = None) -> Request:
    return Request("m", None, None, 1, 0, "cpu", True, read_config(path))


_READERS: list[Callable[[Case], None]] = [
    _read_named("w.safetensors", weights.read_state), _read_named("w.pt", weights.read_state),
    _read_named("c.toml", _request), _read_named("r.json", lambda path: _request().recipe(str(path), None)),
    _read_named("x.npz", lambda path: load_data(f"npz:{path}", 4, config=DataConfig((0.0,), (1.0,)))),
    _read_named("x.json", read_json), _read_named("bench.json", read_layer_list),
    _read_named("curves.json", lambda path: Curves(str(path)).layers),
    _read_result, _read_result, _read_journal, _read_images,
]  # fmt: skip


TARGETS: dict[Callable[[Case], None], int] = {odd_things: 6}
