"""Images of a folder: in class folders, or in the folder itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from snows import InputError, SnowsWarning
from snows.data.images import image_files


def made(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    return root


def test_class_folders_give_labels(tmp_path: Path) -> None:
    root = made(tmp_path, "b/2.png", "a/1.JPG", "a/deep/0.webp", "b/notes.txt")
    found = [(file.relative_to(root).as_posix(), label) for file, label in image_files(root)]
    assert found == [("a/1.JPG", 0), ("a/deep/0.webp", 0), ("b/2.png", 1)]


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    root = made(tmp_path, "2.png", "1.jpeg", "notes.txt", "empty/notes.txt")
    assert [(file.name, label) for file, label in image_files(root)] == [("1.jpeg", None), ("2.png", None)]


def test_images_beside_class_folders_are_left_out_and_said(tmp_path: Path) -> None:
    root = made(tmp_path, "a/1.png", "2.png", "3.png")
    with pytest.warns(SnowsWarning, match="images in class folders and 2 beside them, which are left out"):
        assert [(file.name, label) for file, label in image_files(root)] == [("1.png", 0)]


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no images, neither itself nor in class folders"):
        image_files(made(tmp_path, "a/notes.txt"))
    with pytest.raises(InputError, match="there is no folder"):
        image_files(tmp_path / "missing")
