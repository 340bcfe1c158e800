"""Data that commands read by name: npz files and class folders."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from ..conftest import Snows, assert_error


def pictures(count: int = 12, size: int = 16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def jpegs(count: int = 12) -> tuple[np.ndarray, np.ndarray]:
    files = []
    for picture in pictures(count):
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, "JPEG")
        files.append(buffer.getvalue())
    offsets = np.cumsum([0, *map(len, files)])
    return np.frombuffer(b"".join(files), np.uint8), offsets


NORMALIZED = "[data]\nmean = [0.5, 0.5, 0.5]\nstd = 0.25\nsize = 16\n"
IMAGES = ("prune", "net.py:images", "--recipe", "fast.json", "--samples", "8", "--json", "--data")


def test_npz_files(run: Snows, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(NORMALIZED)
    config = ("--config", tmp_path / "c.toml")
    y = np.arange(12) % 3
    np.savez(tmp_path / "xy.npz", x=pictures(), y=y)
    jpeg, offsets = jpegs()
    np.savez(tmp_path / "jpeg.npz", jpeg=jpeg, offsets=offsets, labels=y)
    np.savez_compressed(tmp_path / "floats.npz", x=np.random.default_rng(1).standard_normal((12, 3, 16, 16)))
    for name in ("xy", "jpeg"):
        data = run(*IMAGES, f"npz:{tmp_path / name}.npz", *config).data
        assert data["samples"] == 8
        assert set(data["evaluation"][0]) == {"network", "top1", "top5", "loss", "agreement", "kl"}
        assert [words[:29] for words in data["warnings"]] == ["there are only 8 calibration s"[:29]]
    data = run(*IMAGES, f"npz:{tmp_path / 'floats.npz'}", *config).data
    assert set(data["evaluation"][0]) == {"network", "agreement", "kl"}
    bare = run(*IMAGES, f"npz:{tmp_path / 'xy.npz'}")
    assert bare.status == 0
    assert bare.err.startswith("warning: no mean and std are given: pixels are only scaled to [0, 1]; --config")


def test_npz_pixels_are_normalized(tmp_path: Path) -> None:
    from snows.data.sources import DataConfig, load_data

    np.savez(tmp_path / "xy.npz", x=pictures(), y=np.arange(12))
    data = load_data(f"npz:{tmp_path / 'xy.npz'}", 8, 3, DataConfig((0.5, 0.4, 0.3), (0.1, 0.2, 0.3)))
    assert data.test is not None
    assert data.test_labels is not None
    assert len(data.calibration) == 8
    assert len(data.test) == 4
    expected = (pictures() / 255 - np.array([0.5, 0.4, 0.3])) / np.array([0.1, 0.2, 0.3])
    found = expected[data.test_labels.numpy()].transpose(0, 3, 1, 2)
    np.testing.assert_allclose(data.test.numpy(), found, rtol=1e-4, atol=1e-5)


def test_class_folders(run: Snows, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[data]\nsize = 16\n")
    for i, picture in enumerate(pictures()):
        folder = tmp_path / "photos" / f"class{i % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).resize((20 + i, 18)).save(folder / f"{i}.png")
        (folder / "notes.txt").write_text("no image")
    words = ("--config", tmp_path / "c.toml")
    data = run(*IMAGES, f"folder:{tmp_path / 'photos'}", *words).data
    assert data["samples"] == 8
    assert "top1" in data["evaluation"][0]
    rows = run("evaluate", "net.py:images", *IMAGES[4:], f"folder:{tmp_path / 'photos'}", *words).data
    assert {k: v for k, v in data["evaluation"][0].items() if k in rows[0]} == rows[0]
    (tmp_path / "photos" / "class0" / "0.png").write_bytes(b"no png")
    assert_error(run(*IMAGES, f"folder:{tmp_path / 'photos'}", *words), 1, "0.png cannot be read as an image")
    (tmp_path / "empty").mkdir()
    assert_error(run(*IMAGES, f"folder:{tmp_path / 'empty'}"), 1, "has no images, neither itself nor in class folders")
    assert_error(run(*IMAGES, f"folder:{tmp_path / 'missing'}"), 1, "there is no folder")


def bad_npz(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    def saved(name: str, **arrays: np.ndarray) -> Path:
        np.savez(tmp_path / f"{name}.npz", **arrays)
        return tmp_path / f"{name}.npz"

    np.savez_compressed(tmp_path / "corrupt.npz", x=pictures())
    content = bytearray((tmp_path / "corrupt.npz").read_bytes())
    content[60:600] = bytes(540)
    (tmp_path / "corrupt.npz").write_bytes(content)
    (tmp_path / "truncated.npz").write_bytes(bytes(content[:500]))
    (tmp_path / "garbage.npz").write_bytes(b"not a zip file at all")
    np.save(tmp_path / "single.npy", pictures())
    jpeg, offsets = jpegs()
    broken = jpeg.copy()
    broken[offsets[3] : offsets[4]] = 0
    labels = np.array(["cat"] * 12)
    return {
        "missing": (tmp_path / "missing.npz", "there is no file"),
        "corrupt": (tmp_path / "corrupt.npz", "cannot be read as npz"),
        "truncated": (tmp_path / "truncated.npz", "cannot be read as npz"),
        "garbage": (tmp_path / "garbage.npz", "cannot be read as npz"),
        "single array": (tmp_path / "single.npy", "is a single array"),
        "other arrays": (saved("other", images=pictures()), "has the arrays images; expected x (and y), or jpeg"),
        "objects": (saved("objects", x=np.array([{}, {}])), "cannot be read as npz"),
        "text": (saved("text", x=np.array(["a", "b"])), "the samples are <U1 of shape (2,); expected numbers"),
        "names": (saved("names", x=pictures(), y=labels), "the labels are <U3 of shape (12,); expected numbers"),
        "too few labels": (saved("few", x=pictures(), y=np.arange(3)), "has 12 samples and 3 labels"),
        "flat": (saved("flat", x=np.zeros((4, 9), np.uint8)), "x has shape (4, 9); images are expected as"),
        "broken JPEG": (saved("broken", jpeg=broken, offsets=offsets), "image 3 cannot be decoded"),
        "offsets": (saved("offsets", jpeg=jpeg, offsets=offsets / 2), "jpeg is uint8 and offsets float64; expected"),
        "no JPEG": (saved("none", jpeg=jpeg[:0], offsets=offsets[:1] * 0), "the images have 0 different sizes"),
    }


def test_bad_npz_files(run: Snows, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(NORMALIZED)
    for case, (path, words) in bad_npz(tmp_path).items():
        outcome = run(*IMAGES, f"npz:{path}", "--config", tmp_path / "c.toml")
        assert words in outcome.err, f"{case}: {outcome}"
        assert_error(outcome, 1, words)
