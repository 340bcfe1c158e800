"""Images from files: what would hang or fill the memory is refused, and very long ones are cut first."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from snows import InputError, SnowsWarning
from snows.data import images


def png(width: int, height: int) -> bytes:
    """The header of a PNG of this size, with nothing in it."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + head
        + struct.pack(">I", zlib.crc32(head))
        + b"\0\0\0\0IDAT\x35\xaf\x06\x1e"
    )


def jpeg(width: int, height: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height)).save(stream, "JPEG")
    return stream.getvalue()


@pytest.mark.parametrize("name", ["x.png", "x.jpg"])
def test_images_are_not_read_from_fifos(tmp_path: Path, name: str) -> None:
    (tmp_path / "class").mkdir()
    os.mkfifo(tmp_path / "class" / name)
    files = [file for file, _ in images.image_files(tmp_path)]
    with pytest.raises(InputError, match="is a FIFO; expected a regular file"):
        images.read_images(files, 8)


@pytest.mark.parametrize(("width", "height"), [(9000, 9000), (2**31 - 1, 1), (1, 2**31 - 1)])
def test_images_of_too_many_pixels_are_refused(tmp_path: Path, width: int, height: int) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(png(width, height))
    with pytest.raises(InputError, match=r"pixels; expected at most 80,000,000|Image size \(2147483647 pixels\)"):
        images.read_images([path], 8)


@pytest.mark.parametrize("name", ["x.png", "x.jpg"])
def test_an_image_of_a_gigabyte_is_refused_unread(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with path.open("wb") as stream:
        stream.write(png(8, 8) if name == "x.png" else jpeg(8, 8))
        stream.truncate((1 << 30) + 1)  # holes only
    with pytest.raises(InputError, match="has more than 1,073,741,824 bytes"):
        images.read_images([path], 8)


@pytest.mark.parametrize("size", [(1, 60_000), (60_000, 1), (3, 4000)])
def test_a_very_long_image_is_cut_before_it_is_resized(
    tmp_path: Path, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 x 60000 pixels would become 256 x 15 million."""
    path, largest = tmp_path / "x.png", [0]
    Image.new("L", size, 77).save(path)
    resize = Image.Image.resize

    def watched(picture: Image.Image, to: tuple[int, int]) -> Image.Image:
        largest[0] = max(largest[0], to[0] * to[1])
        return resize(picture, to)

    monkeypatch.setattr(Image.Image, "resize", watched)
    pixels = images.read_images([path], 224)
    assert pixels.shape == (1, 224, 224, 3)
    assert (pixels == 77).all()
    assert largest[0] <= 256 * 256 * (images._LONGEST + 1)


def test_the_middle_of_a_long_image_is_what_it_was(tmp_path: Path) -> None:
    """Nothing is lost by the cut that the crop would have kept."""
    path = tmp_path / "x.png"
    content = np.random.default_rng(0).integers(0, 255, (64, 1024, 3), np.uint8)
    Image.fromarray(content).save(path)
    whole = Image.fromarray(content).resize((1024 * 73 // 64, 73))
    left, top = (whole.width - 64) // 2, (whole.height - 64) // 2
    expected = np.asarray(whole.crop((left, top, left + 64, top + 64))).astype(int)
    assert np.abs(images.read_images([path], 64)[0].astype(int) - expected).max() <= 3


def test_programs_are_not_started_for_other_formats(tmp_path: Path) -> None:
    """Pillow would hand PostScript to Ghostscript, whatever the file is called."""
    path = tmp_path / "x.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    with pytest.raises(InputError, match="cannot be read as an image: it is none of JPEG"):
        images.read_images([path], 8)


def test_small_jpegs_that_would_fill_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_pixels", lambda picture: pytest.fail("decoded"))
    one = jpeg(4000, 4000)
    with pytest.raises(InputError, match="would become"):
        images.decode_jpegs(np.frombuffer(one * 10, np.uint8), np.arange(11) * len(one), tmp_path / "x.npz")


def test_jpegs_of_different_sizes_are_refused_before_they_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "_pixels", lambda picture: pytest.fail("decoded"))
    files = [jpeg(8, 8), jpeg(8, 9)]
    offsets = np.cumsum([0, *map(len, files)])
    with pytest.raises(InputError, match="2 different sizes"):
        images.decode_jpegs(np.frombuffer(b"".join(files), np.uint8), offsets, tmp_path / "x.npz")


def made(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    return root


def test_class_folders_give_labels(tmp_path: Path) -> None:
    root = made(tmp_path, "b/2.png", "a/1.JPG", "a/deep/0.webp", "b/notes.txt")
    found = [(file.relative_to(root).as_posix(), label) for file, label in images.image_files(root)]
    assert found == [("a/1.JPG", 0), ("a/deep/0.webp", 0), ("b/2.png", 1)]


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    root = made(tmp_path, "2.png", "1.jpeg", "notes.txt", "empty/notes.txt")
    assert [(file.name, label) for file, label in images.image_files(root)] == [("1.jpeg", None), ("2.png", None)]


def test_images_beside_class_folders_are_left_out_and_said(tmp_path: Path) -> None:
    root = made(tmp_path, "a/1.png", "2.png", "3.png")
    with pytest.warns(SnowsWarning, match="images in class folders and 2 beside them, which are left out"):
        assert [(file.name, label) for file, label in images.image_files(root)] == [("1.png", 0)]


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no images, neither itself nor in class folders"):
        images.image_files(made(tmp_path, "a/notes.txt"))
    with pytest.raises(InputError, match="there is no folder"):
        images.image_files(tmp_path / "missing")


@pytest.mark.parametrize("kind", [FileNotFoundError, PermissionError])
def test_a_folder_that_vanishes_or_is_closed(
    tmp_path: Path, kind: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "class" / "inside").mkdir(parents=True)
    Image.new("L", (8, 8)).save(tmp_path / "class" / "x.png")
    scan = os.scandir

    def fails(path: Path) -> object:
        if str(path).endswith("inside"):
            raise kind(1, "it is gone", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", fails)
    if kind is FileNotFoundError:
        assert [file.name for file, _ in images.image_files(tmp_path)] == ["x.png"]
    else:
        with pytest.raises(InputError, match=r"cannot read .*inside: it is gone"):
            images.image_files(tmp_path)
