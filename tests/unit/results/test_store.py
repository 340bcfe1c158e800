"""Tensors of finished work in files that say what they are for."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

import snows
from snows.results.folder import Folder
from snows.results.store import Store, digest_for, kept
from tests.saved import contents

SHARED = torch.arange(6.0).view(2, 3)
PARTS = {"weights": {"a:b": SHARED, "c": SHARED}, "mask": {0: SHARED > 2}, "none": {}}


def store(folder: Path, **settings: Any) -> Store:
    return Store(Folder(folder, settings), "pieces")


def read(kept_in: Store, name: str) -> Any:
    return kept_in.read(name, lambda parts, note: ({kind: dict(found) for kind, found in parts.items()}, note))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    store(tmp_path).write("first", PARTS, {"loss": 0.5, "masked": math.inf})
    parts, note = read(store(tmp_path), "first")
    assert note == {"loss": 0.5, "masked": math.inf}
    assert {kind: sorted(found) for kind, found in parts.items()} == {"weights": ["a:b", "c"], "mask": ["0"]}
    for found in (parts["weights"]["a:b"], parts["weights"]["c"]):
        assert torch.equal(found, SHARED)
    assert torch.equal(parts["mask"]["0"], SHARED > 2)
    assert read(store(tmp_path), "second") is None


def test_a_piece_has_one_file(tmp_path: Path) -> None:
    place = store(tmp_path)
    for number in (2, 1):
        place.write(f"piece{number}", PARTS, 1)
        place.write(f"piece{number}", PARTS, 2)
    assert kept(place.place, "piece*") == ["piece1", "piece2"]
    assert read(place, "piece1")[1] == 2
    place.remove("piece1")
    assert kept(place.place, "piece*") == ["piece2"]
    assert kept(tmp_path / "elsewhere", "*") == []


def spoilt(place: Path) -> None:
    (file,) = place.glob("first-*")
    file.write_bytes(file.read_bytes()[:-1] + b"?")


def renamed(place: Path) -> None:
    (file,) = place.glob("second-*")
    file.replace(place / file.name.replace("second", "first"))


def of_another(place: Path) -> None:
    (file,) = place.glob("first-*")
    file.unlink()
    data = save({"weights:c": SHARED}, metadata={"note": "1"})
    (place / f"first-{digest_for({'seed': 1}, 'first', data)}.safetensors").write_bytes(data)


def without_a_note(place: Path) -> None:
    (file,) = place.glob("first-*")
    file.unlink()
    data = save({"weights:c": SHARED})
    (place / f"first-{digest_for({'seed': 0}, 'first', data)}.safetensors").write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoilt, "not what was written for first of this run"),
        (renamed, "not what was written for first of this run"),
        (of_another, "not what was written for first of this run"),
        (without_a_note, "__metadata__"),
    ],
)
def test_what_belongs_elsewhere_is_not_read(spoil: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    place = store(tmp_path, seed=0)
    place.write("second", PARTS, 2)
    if spoil is not renamed:
        place.write("first", PARTS, 1)
    spoil(place.place)
    with pytest.warns(snows.SnowsWarning, match=rf"first-\w+\.safetensors is damaged \(.*{words}.*\); it is done"):
        assert read(place, "first") is None


def test_what_cannot_be_understood_is_damaged(tmp_path: Path) -> None:
    place = store(tmp_path)
    place.write("first", PARTS, 1)

    def understand(parts: dict[str, dict[str, Tensor]], note: Any) -> Tensor:
        return parts["weights"]["d"]

    with pytest.warns(snows.SnowsWarning, match=r"is damaged \('d'\)"):
        assert place.read("first", understand) is None


def test_folders_of_other_settings_and_things_that_are_no_files_are_refused(tmp_path: Path) -> None:
    store(tmp_path, seed=0).write("first", PARTS, 1)
    before = contents(tmp_path)
    with pytest.raises(snows.InputError, match="seed was 0 and is 1"):
        store(tmp_path, seed=1)
    assert contents(tmp_path) == before
    (tmp_path / "pieces" / "first-x").mkdir()
    with pytest.raises(snows.InputError, match="first-x is no regular file"):
        store(tmp_path, seed=0)
