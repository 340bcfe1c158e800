"""Data by name: the embedded images, class folders, npz files, or the user's own factory."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, Subset

from ..errors import ArgumentError, InputError, SnowsWarning
from . import embedded
from .models import call_factory
from .samples import check_seed

HELP = f"{embedded.DATA}, folder:DIR, npz:FILE or file.py:factory"
_TEST_SAMPLES = 2000  # of a data set that has no test part of its own
_IMAGENET: tuple[tuple[float, ...], tuple[float, ...]] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


@dataclass(frozen=True)
class DataConfig:
    """How pixels become inputs: (pixel / 255 - mean) / std, and the size images of folders are brought to."""

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    size: int = 224


@dataclass(frozen=True)
class Data:
    """Samples to calibrate on, and others to evaluate on (labels where there are any)."""

    calibration: Any
    test: Tensor | None = None
    test_labels: Tensor | None = None
    calibration_labels: Tensor | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether the test samples are windows of tokens, which are their own labels."""
        return self.test is not None and self.test.ndim == 2 and not self.test.is_floating_point()

    def samples(self, with_labels: bool) -> Any:
        """The calibration samples as `snows.prune` takes them. Factories give labels within their batches."""
        if not with_labels or self.calibration_labels is None:
            return self.calibration
        return [(self.calibration, self.calibration_labels)]


def load_data(name: str, samples: int, seed: int = 0, config: DataConfig | None = None) -> Data:
    """Calibration samples and disjoint test samples of the named data."""
    if samples < 1:
        raise ArgumentError(f"samples is {samples}; expected at least 1")
    check_seed(seed)
    config = config or DataConfig()
    kind, _, rest = name.rpartition(":")
    if name == embedded.DATA:
        x, y, test_x, test_y = embedded.images()
        return Data(x[:samples], test_x, test_y, y[:samples])
    if kind == "folder" and rest:
        return _split(*_read_folder(Path(rest), samples + _TEST_SAMPLES, seed, config), samples, seed=None)
    if kind == "npz" and rest:
        return _split(*read_npz(Path(rest), config.mean, config.std), samples, seed)
    if kind.endswith(".py") and rest:
        return _from_factory(call_factory(kind, rest), samples, name)
    raise ArgumentError(f"data {name!r} is not known; expected {HELP}")


def _split(x: Tensor, y: Tensor | None, samples: int, seed: int | None) -> Data:
    """The first `samples` in random order calibrate, the next ones test."""
    if seed is not None:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: samples + _TEST_SAMPLES]
        x, y = x[order], None if y is None else y[order]
    calibrating, testing = slice(samples), slice(samples, samples + _TEST_SAMPLES)
    labels = (None, None) if y is None else (y[testing], y[calibrating])
    rest = x[testing]
    return Data(x[calibrating], rest if len(rest) else None, labels[0] if len(rest) else None, labels[1])


def _from_factory(made: Any, samples: int, name: str) -> Data:
    """A tensor, Dataset or DataLoader to calibrate on; or (calibration, test inputs[, test labels])."""
    if isinstance(made, Tensor):
        return _split(made, None, samples, seed=None)
    if not isinstance(made, tuple) or not 2 <= len(made) <= 3:
        return Data(_first(made, samples))
    for what, value in zip(("test inputs", "test labels"), made[1:], strict=False):
        if not isinstance(value, Tensor):
            raise InputError(f"{name} gave {what} that are a {type(value).__name__}; expected a tensor")
    return Data(_first(made[0], samples), *made[1:])


def _first(calibration: Any, samples: int) -> Any:
    """The first samples of whatever can calibrate; what cannot is refused later."""
    if isinstance(calibration, Tensor | Mapping):
        return _rows(calibration, samples)
    if isinstance(calibration, Dataset) and hasattr(calibration, "__len__"):
        return Subset(calibration, range(min(samples, len(calibration))))
    if isinstance(calibration, Iterable) and not isinstance(calibration, Iterator | str | bytes):
        return _FirstBatches(calibration, samples)
    return calibration


@dataclass(frozen=True)
class _FirstBatches:
    """Batches up to a number of samples; the last one is cut."""

    batches: Iterable[Any]
    samples: int

    def __iter__(self) -> Iterator[Any]:
        left = self.samples
        for batch in self.batches:
            sizes = [len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
            yield _rows(batch, left)
            left -= sizes[0] if sizes else 0
            if left <= 0:
                return


def _rows(batch: Any, count: int) -> Any:
    return pytree.tree_map(lambda leaf: leaf[:count] if isinstance(leaf, Tensor) and leaf.ndim else leaf, batch)


def read_npz(
    path: Path, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Normalized images (n, channels, height, width) and labels: arrays `x`, `y` or `jpeg`, `offsets`, `labels`.

    Only bytes are pixels. Other numbers are inputs as they are: whole ones are tokens, samples x length.
    """
    try:
        with path.open("rb") as stream:  # numpy leaves a damaged file open
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise InputError(f"{path} is a single array; expected an npz file with named ones (numpy.savez)")
            arrays = {key: archive[key] for key in archive.files}  # each access reads the array anew
    except FileNotFoundError as error:
        raise InputError(f"there is no file {path}") from error
    except InputError:
        raise
    except Exception as error:  # damaged archives raise many kinds
        raise InputError(f"{path} cannot be read as npz: {_reason(error)}") from error
    for key, value in arrays.items():
        if not isinstance(value, np.ndarray):
            raise InputError(f"{path}: {key} is no array; expected an npz file of arrays (numpy.savez)")
    if {"jpeg", "offsets"} <= set(arrays):
        pixels, labels = _decode(arrays["jpeg"], arrays["offsets"], path), arrays.get("labels")
    elif "x" in arrays:
        pixels, labels = arrays["x"], arrays.get("y")
    else:
        raise InputError(
            f"{path} has the arrays {', '.join(arrays) or 'none'}; expected x (and y), or jpeg and offsets"
        )
    for what, array, kinds in (("samples", pixels, "uif"), ("labels", labels, "ui")):
        if array is not None and (array.dtype.kind not in kinds or not array.ndim):
            raise InputError(f"{path}: the {what} are {array.dtype} of shape {array.shape}; expected numbers")
    if labels is not None and len(labels) != len(pixels):
        raise InputError(f"{path} has {len(pixels)} samples and {len(labels)} labels")
    y = None if labels is None else torch.from_numpy(labels.astype(np.int64))
    if pixels.dtype != np.uint8:
        return _as_tensor(pixels, path), y  # inputs as they are
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    if pixels.ndim != 4:
        raise InputError(f"{path}: x has shape {pixels.shape}; images are expected as n x height x width (x channels)")
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div_(255)
    if mean is None or std is None:
        warnings.warn(
            "no mean and std are given for the npz file: pixels are only scaled to [0, 1] (--config sets them in "
            "[data])",
            SnowsWarning,
            stacklevel=3,
        )
        return x.contiguous(), y
    return _normalize(x, mean, std).contiguous(), y


def _as_tensor(array: np.ndarray, path: Path) -> Tensor:
    whole = array.dtype.kind in "ui"  # of any width: embeddings read few of them
    try:
        return torch.from_numpy(array.astype(np.int64 if whole else array.dtype.newbyteorder("="), copy=False))
    except TypeError as error:  # such as float128
        raise InputError(f"{path}: the samples are {array.dtype}, which torch does not know; give float32") from error


def _normalize(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    if len(mean) not in (1, x.shape[1]) or len(std) not in (1, x.shape[1]):
        raise InputError(f"the images have {x.shape[1]} channels, mean and std have {len(mean)} and {len(std)} entries")
    return x.sub_(torch.tensor(mean).view(-1, 1, 1)).div_(torch.tensor(std).view(-1, 1, 1))


def _decode(jpeg: np.ndarray, offsets: np.ndarray, path: Path) -> np.ndarray:
    image = _pillow()
    if jpeg.dtype != np.uint8 or jpeg.ndim != 1 or offsets.dtype.kind not in "ui" or offsets.ndim != 1:
        raise InputError(
            f"{path}: jpeg is {jpeg.dtype} and offsets {offsets.dtype}; expected the files' bytes (uint8) in a row, "
            "and whole numbers: where each begins, and where the last ends"
        )

    def one(i: int) -> np.ndarray:
        try:
            with image.open(io.BytesIO(jpeg[offsets[i] : offsets[i + 1]].tobytes())) as picture:
                return np.asarray(_as_rgb(picture))
        except Exception as error:  # damaged images raise many kinds
            raise InputError(f"{path}: image {i} cannot be decoded: {_reason(error)}") from error

    with ThreadPoolExecutor() as pool:
        pictures = list(pool.map(one, range(len(offsets) - 1)))
    shapes = {picture.shape for picture in pictures}
    if len(shapes) != 1:
        raise InputError(f"{path}: the images have {len(shapes)} different sizes; expected one")
    return np.stack(pictures)


def _read_folder(root: Path, limit: int, seed: int, config: DataConfig) -> tuple[Tensor, Tensor]:
    """Up to `limit` images in random order, resized (shorter side) and centre-cropped; labels by class folder."""
    if not root.is_dir():
        raise InputError(f"there is no folder {root}")
    classes = sorted(entry for entry in root.iterdir() if entry.is_dir())
    files = [
        (file, label)
        for label, folder in enumerate(classes)
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in _SUFFIXES
    ]
    if not files:
        raise InputError(f"{root} has no images in class folders (expected {root}/CLASS/image.jpg)")
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed))[:limit].tolist()
    mean, std = _IMAGENET if config.mean is None or config.std is None else (config.mean, config.std)
    with ThreadPoolExecutor() as pool:
        pixels = list(pool.map(lambda i: _open_image(files[i][0], config.size), order))
    x = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float().div_(255)
    return _normalize(x, mean, std).contiguous(), torch.tensor([files[i][1] for i in order])


def _open_image(file: Path, size: int) -> np.ndarray:
    image = _pillow()
    try:
        with image.open(file) as picture:
            picture = _as_rgb(picture)
    except Exception as error:  # damaged images raise many kinds
        raise InputError(f"{file} cannot be read as an image: {_reason(error)}") from error
    scale = round(size * 256 / 224) / min(picture.size)
    resized = picture.resize((max(size, round(picture.width * scale)), max(size, round(picture.height * scale))))
    left, top = (resized.width - size) // 2, (resized.height - size) // 2
    return np.asarray(resized.crop((left, top, left + size, top + size)))


def _as_rgb(picture: Any) -> Any:
    """8 bits for each color. Pillow alone would cut 16 bits off at 255, and fractions at 0."""
    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format == "PNG"):
        return _pillow().fromarray((np.asarray(picture) >> 8).astype(np.uint8)).convert("RGB")
    if picture.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers of unknown range; save it with 8 or 16 bits for each color")
    return picture.convert("RGB")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError("pillow is needed to read images; install it with: pip install 'snows[images]'") from error
    return Image
