"""Images as inputs of a network: decoded from files or bytes, cropped, normalized."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import Lock
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from ..caller import free_in_children
from ..errors import InputError, SnowsWarning
from ..reading import check_unpacked, entries, is_folder, open_file

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "PPM")  # others may start a program, as EPS does
_RESIZED = 256 / 224  # the shorter side before the crop, as for ImageNet
_MOST_PIXELS = 8 * 10**7  # Pillow warns a little above
_LARGEST_FILE = 1 << 30  # bytes
_MANY_PIXELS = 10**7  # of an image that is decoded alone
_LONGEST = 4  # sides: beyond that the ends of an image are cut off before it is resized, as the crop would anyway
_ONE_LARGE_IMAGE = Lock()
free_in_children(_ONE_LARGE_IMAGE)


def image_files(root: Path) -> list[tuple[Path, int | None]]:
    """The images of a folder, in the order of their names, with labels: one folder inside per class counts classes.

    Where no class folder has an image, the images of the folder itself are taken, without labels.
    """
    if not is_folder(root):
        raise InputError(f"there is no folder {root}")
    flat = [entry for entry in entries(root) if entry.suffix.lower() in _SUFFIXES and not is_folder(entry)]
    labeled = _labeled_files(root)
    if flat and labeled:
        warnings.warn(
            f"{root} has images in class folders and {len(flat)} beside them, which are left out",
            SnowsWarning,
            stacklevel=3,
        )
    if not flat and not labeled:
        raise InputError(f"{root} has no images, neither itself nor in class folders ({root}/CLASS/image.jpg)")
    return [*labeled] or [(file, None) for file in flat]


def _labeled_files(root: Path) -> list[tuple[Path, int]]:
    classes = [entry for entry in entries(root) if is_folder(entry)]
    return [
        (file, label)
        for label, folder in enumerate(classes)
        for file in _files_below(folder)
        if file.suffix.lower() in _SUFFIXES
    ]


def _files_below(folder: Path) -> list[Path]:
    """All files of a folder and its folders, by name. What is removed meanwhile is passed over."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise InputError(f"cannot read {error.filename}: {error.strerror}") from error

    return sorted(Path(place) / name for place, _, names in os.walk(folder, onerror=refuse) for name in names)


def read_images(files: Sequence[Path], size: int) -> np.ndarray:
    """Pixels (n x size x size x 3) of images whose shorter side is resized and whose centre is cropped."""
    with ThreadPoolExecutor() as pool:
        return np.stack(list(pool.map(lambda file: _read_image(file, size), files)))


def decode_jpegs(jpeg: np.ndarray, offsets: np.ndarray, path: Path) -> np.ndarray:
    """Pixels (n x height x width x 3) of images of one size, whose bytes follow each other."""
    if jpeg.dtype != np.uint8 or jpeg.ndim != 1 or offsets.dtype.kind not in "ui" or offsets.ndim != 1:
        raise InputError(
            f"{path}: jpeg is {jpeg.dtype} and offsets {offsets.dtype}; expected the bytes of all files one after the "
            "other (uint8), and whole numbers: where each file begins, and where the last one ends"
        )
    count = len(offsets) - 1

    def opened(i: int) -> Any:
        return _opened(io.BytesIO(jpeg[offsets[i] : offsets[i + 1]].tobytes()))

    def each(look: Callable[[Any], Any]) -> list[Any]:
        def one(i: int) -> Any:
            try:
                with opened(i) as picture:
                    return look(picture)
            except Exception as error:  # damaged images raise many kinds
                raise InputError(f"{path}: image {i} cannot be decoded: {reason(error)}") from error

        with ThreadPoolExecutor() as pool:
            return list(pool.map(one, range(count)))

    sizes = set(each(lambda picture: picture.size))
    if len(sizes) != 1:
        raise InputError(f"{path}: the images have {len(sizes)} different sizes; expected one")
    width, height = sizes.pop()
    check_unpacked(path, len(jpeg), 3 * count * width * height)
    return np.stack(each(_pixels))


def as_inputs(pixels: np.ndarray) -> Tensor:
    """Bytes (n x height x width x channels) as floats between 0 and 1 (n x channels x height x width)."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div_(255)


def normalize(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x - mean) / std for each channel, in place."""
    if len(mean) not in (1, x.shape[1]) or len(std) not in (1, x.shape[1]):
        raise InputError(f"the images have {x.shape[1]} channels, mean and std have {len(mean)} and {len(std)} entries")
    return x.sub_(torch.tensor(mean).view(-1, 1, 1)).div_(torch.tensor(std).view(-1, 1, 1)).contiguous()


def reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _read_image(file: Path, size: int) -> np.ndarray:
    with open_file(file, _LARGEST_FILE) as stream:
        try:
            with _opened(stream) as picture:
                picture = _without_far_ends(_decoded(picture))
        except Exception as error:  # damaged images raise many kinds
            raise InputError(f"{file} cannot be read as an image: {reason(error)}") from error
    scale = round(size * _RESIZED) / min(picture.size)
    resized = picture.resize((max(size, round(picture.width * scale)), max(size, round(picture.height * scale))))
    left, top = (resized.width - size) // 2, (resized.height - size) // 2
    return np.asarray(resized.crop((left, top, left + size, top + size)))


def _opened(stream: IO[bytes]) -> Any:
    """An image of which only the header is read; its size is checked before the pixels are."""
    pillow = _pillow()
    try:
        picture = pillow.open(stream, formats=_FORMATS)
    except pillow.UnidentifiedImageError as error:  # it names the stream only
        raise ValueError(f"it is none of {', '.join(_FORMATS)}") from error
    if picture.width * picture.height > _MOST_PIXELS:
        raise ValueError(f"it has {picture.width} x {picture.height} pixels; expected at most {_MOST_PIXELS:,}")
    return picture


def _decoded(picture: Any) -> Any:
    """As RGB. Large images one at a time, whatever the number of threads."""
    alone: AbstractContextManager[Any] = nullcontext()
    if picture.width * picture.height > _MANY_PIXELS:
        alone = _ONE_LARGE_IMAGE
    with alone:
        return _as_rgb(picture)


def _pixels(picture: Any) -> np.ndarray:
    return np.asarray(_decoded(picture))


def _without_far_ends(picture: Any) -> Any:
    """The middle of an image that is very long or very high."""
    most = _LONGEST * min(picture.size)
    left, top = (max(0, (side - most) // 2) for side in picture.size)
    if left == top == 0:
        return picture
    return picture.crop((left, top, picture.width - left, picture.height - top))


def _as_rgb(picture: Any) -> Any:
    """8 bits per color. Pillow by itself would clip 16 bits at 255 and round fractions to 0."""
    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format == "PNG"):
        return _pillow().fromarray((np.asarray(picture) >> 8).astype(np.uint8)).convert("RGB")
    if picture.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers of unknown range; save it with 8 or 16 bits for each color")
    return picture.convert("RGB")


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError("pillow is needed to read images; install it with: pip install 'snows[images]'") from error
    return Image
