"""Whole files at other places, and places that results are to be written to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import snows
from snows.results import journal, storage

from .mutations import odd_value
from .world import Case


def odd_path(case: Case) -> Any:
    """A place within the case's own folder: a file, a link, missing, too long; or no path at all."""
    rng, base = case.random, case.folder / "a" / "b" / "c"
    base.mkdir(parents=True, exist_ok=True)
    (base / "file").touch()
    if not (base / "loop").is_symlink():
        (base / "loop").symlink_to("loop")
    word = rng.choice([odd_value(rng), odd_value(rng), "file", "file/x", "loop", "loop/x", ".", "x" * 300, "x/y/z"])
    if not isinstance(word, str):
        return word
    path = f"{base}/{word.lstrip('/')}"
    return path if rng.random() < 0.5 else Path(path)


def exchanged_resume_files(case: Case) -> None:
    """What is recalled is what was kept for this layer, whatever the files were renamed to."""
    rng, files = case.random, dict(case.world.journal)
    names = sorted(name for name in files if name.startswith("layers/"))
    one, two = rng.sample(names, 2)
    if rng.random() < 0.5:  # the contents, or the beginnings of the names
        files[one], files[two] = files[two], files[one]
    else:
        first, second = (name.rpartition("-") for name in (one, two))
        files[f"{second[0]}-{first[2]}"], files[f"{first[0]}-{second[2]}"] = files.pop(one), files.pop(two)
    for name, content in files.items():
        case.write(f"resume/{name}", content)
    found = journal.DiskJournal(case.folder / "resume", case.world.settings, torch.device("cpu"))
    truth = journal.DiskJournal(case.world.folder / "resume", case.world.settings, torch.device("cpu"))
    for index in range(3):
        given, kept = found.recall(0, index), truth.recall(0, index)
        if given is not None and (kept is None or not _same(given.weights, kept.weights)):
            raise ValueError(f"layer {index} got what another one left")


def _same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def cut_off_saves(case: Case) -> None:
    """Both versions under hidden names, as a kill between two renames leaves them; or one of them."""
    rng = case.random
    place = case.folder / rng.choice(["out", "o[ut", "ö"])
    versions = {place.with_name(f".{place.name}-abcd1234"): case.world.small_result,
                place.with_name(f".{place.name}-abcd1234-old"): case.world.result}  # fmt: skip
    neighbour = f".{place.name}-v2-abcd1234-old/model.safetensors"  # of another name
    case.write(neighbour, b"mine")
    left = dict(rng.sample(sorted(versions.items()), rng.choice([1, 2])))
    for folder, files in left.items():
        for name, content in files.items():
            case.write(f"{folder.name}/{name}", content)
    mendable = any(folder.name.endswith("-old") for folder in left)
    try:
        rng.choice([lambda: snows.load(place, case.fresh_model()), lambda: snows.verify(place, case.fresh_model())])()
    except snows.InputError:
        if mendable:
            raise RuntimeError("a replacement that was cut off was not mended") from None
        raise
    if not snows.verify(place, case.fresh_model()).ok or not (case.folder / neighbour).exists():
        raise RuntimeError("what was mended is not whole, or is another's")


def output_places(case: Case) -> None:
    """A place that passes the check can be written to; nothing of the user's is gone then."""
    rng, folder = case.random, case.folder / "user"
    folder.mkdir()
    there = ["file", "state/x", "out/mine.txt", "out/report.html/mine.txt", "empty/"]
    for name in rng.sample(there, rng.choice([0, 1, 2])):
        (folder / name).mkdir(parents=True) if name.endswith("/") else case.write(f"user/{name}", b"mine")
    for name in rng.sample(["loop", "link", "lost"], rng.choice([0, 1])):
        (folder / name).symlink_to({"loop": "loop", "link": "empty", "lost": "nowhere"}[name])
    if rng.random() < 0.4:
        _put_result(case, folder / "out")
    names = [
        "out",
        "empty",
        "file",
        "file/out",
        "loop",
        "loop/out",
        "link",
        "lost",
        "state",
        "a/b/out",
        "x" * 300,
        "x" * 250,
    ]
    place = rng.choice(
        [*(folder / name for name in names), folder, Path("/proc"), Path("/dev/null/x"), Path("/proc/x")]
    )
    mine, force = _users_files(folder), rng.random() < 0.5
    try:
        storage.check_output(place, force, rng.choice([None, folder / "state", place, place / "state"]))
    except snows.InputError:
        _require_same(mine, _users_files(folder))
        raise
    _require_same(mine, _users_files(folder))
    try:
        case.world.saved_result.save(place, force=force)
    except snows.InputError as error:
        raise RuntimeError("the check was passed, and the result could not be saved") from error
    _require_same(mine, _users_files(folder))
    if not snows.verify(place, case.fresh_model()).ok:
        raise RuntimeError("what was saved is not whole")


def _put_result(case: Case, place: Path) -> None:
    for name, content in case.world.result.items():
        path = place / name
        if not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    if case.random.random() < 0.3:
        (place / case.random.choice(["checkpoint.pt", "model.compact.safetensors"])).write_bytes(b"mine")


def _users_files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.read_bytes() == b"mine"
    }


def _require_same(before: set[str], after: set[str]) -> None:
    if before != after:
        raise RuntimeError(f"the user's files changed: {sorted(before ^ after)[:3]}")


TARGETS: dict[Callable[[Case], None], int] = {exchanged_resume_files: 3, cut_off_saves: 2, output_places: 4}
