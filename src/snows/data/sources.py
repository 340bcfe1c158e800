"""Data by name: the embedded images, class folders, npz files, or the user's own factory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, Subset

from ..errors import ArgumentError, InputError, SnowsWarning
from ..reading import check_unpacked, open_file
from . import embedded, images
from .models import call_factory
from .samples import check_seed

HELP = f"{embedded.DATA}, folder:DIR, npz:FILE or file.py:factory"
_ARRAYS = ("x", "y", "jpeg", "offsets", "labels")  # of npz files
_LISTED = 10  # names in a message
_TEST_SAMPLES = 2000  # of data that has no test part of its own
_IMAGENET: tuple[tuple[float, ...], tuple[float, ...]] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class DataConfig:
    """How pixels become inputs: (pixel / 255 - mean) / std. Images of folders are cropped to `size`.

    `origin` names the model whose library gave mean and std; it is empty where the user did.
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    size: int = 224
    origin: str = ""

    def say_what_is_taken(self, what: str) -> None:
        """Warn if the user did not give mean and std. `what` is taken where nobody did."""
        if self.mean is not None and not self.origin:
            return
        taken = what
        if self.mean is not None and self.std is not None:
            mean, std = (", ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
            taken = f"pixels are normalized as {self.origin} was trained (mean {mean}; std {std})"
        warnings.warn(f"no mean and std are given: {taken}; --config sets others in [data]", SnowsWarning, stacklevel=4)


@dataclass(frozen=True)
class Data:
    """Samples to calibrate on, and others to evaluate on. Labels are None if the data has none, or within batches."""

    calibration: Any
    test: Any = None
    test_labels: Tensor | None = None
    calibration_labels: Tensor | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether the test samples are windows of tokens, which are their own labels."""
        return isinstance(self.test, Tensor) and self.test.ndim == 2 and not self.test.is_floating_point()

    @property
    def has_labels(self) -> bool:
        """Whether the test samples may have labels. Batches of a loader are not read for this."""
        return self.test_labels is not None or not isinstance(self.test, Tensor)

    @property
    def test_count(self) -> int | None:
        """How many test samples there are; None if only reading them would tell."""
        samples = getattr(self.test, "dataset", self.test)
        return len(samples) if isinstance(samples, Tensor | Dataset) and hasattr(samples, "__len__") else None

    def samples(self, with_labels: bool) -> Any:
        """The calibration samples as `snows.prune` takes them. Factories give labels within their batches."""
        if not with_labels or self.calibration_labels is None:
            return self.calibration
        return [(self.calibration, self.calibration_labels)]


def load_data(name: str, samples: int | None, seed: int = 0, config: DataConfig | None = None) -> Data:
    """Calibration samples and disjoint test samples of the named data.

    With None as their number all samples calibrate but those that are test samples by name.
    """
    if samples is not None and samples < 1:
        raise ArgumentError(f"samples is {samples}; expected at least 1")
    check_seed(seed)
    config = config or DataConfig()
    kind, _, rest = name.rpartition(":")
    if name == embedded.DATA:
        x, y, test_x, test_y = embedded.images()
        return Data(x[:samples], test_x, test_y, y[:samples])
    if kind == "folder" and rest:
        return _split(*_read_folder(Path(rest), _with_test(samples), seed, config), samples)
    if kind == "npz" and rest:
        return _drawn(*_read_npz(Path(rest), config), samples, seed)
    if kind.endswith(".py") and rest:
        return _from_factory(call_factory(kind, rest), samples, name)
    raise ArgumentError(f"data {name!r} is not known; expected {HELP}")


def _with_test(samples: int | None) -> int | None:
    return None if samples is None else samples + _TEST_SAMPLES


def _split(x: Tensor, y: Tensor | None, samples: int | None) -> Data:
    """The first `samples` calibrate, the next ones test."""
    calibrating, testing = slice(samples), slice(samples, _with_test(samples))
    labels = None if y is None else y[calibrating]
    if samples is None or len(x) <= samples:
        return Data(x[calibrating], calibration_labels=labels)
    return Data(x[calibrating], x[testing], None if y is None else y[testing], labels)


def _drawn(x: Tensor, y: Tensor | None, samples: int | None, seed: int) -> Data:
    """As `_split`, in random order."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: _with_test(samples)]
    return _split(x[order], None if y is None else y[order], samples)


def _from_factory(made: Any, samples: int | None, name: str) -> Data:
    """A tensor, Dataset or DataLoader to calibrate on; or (calibration, test samples[, test labels])."""
    if isinstance(made, Tensor):
        return _split(made, None, samples)
    if not isinstance(made, tuple) or not 2 <= len(made) <= 3:
        return Data(_first(made, samples))
    if len(made) == 3 and not isinstance(made[2], Tensor):
        raise InputError(f"{name} gave test labels that are a {type(made[2]).__name__}; expected a tensor")
    return Data(_first(made[0], samples), *made[1:])


def _first(calibration: Any, samples: int | None) -> Any:
    """The first samples of the data. What cannot calibrate is refused later."""
    if samples is None:
        return calibration
    if isinstance(calibration, Tensor | Mapping):
        return _rows(calibration, samples)
    if isinstance(calibration, Dataset) and hasattr(calibration, "__len__"):
        return Subset(calibration, range(min(samples, len(calibration))))
    if isinstance(calibration, Iterable) and not isinstance(calibration, Iterator | str | bytes):
        return _FirstBatches(calibration, samples)
    return calibration


@dataclass(frozen=True)
class _FirstBatches:
    """Batches up to a number of samples. The last one is cut."""

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


def _read_folder(root: Path, limit: int | None, seed: int, config: DataConfig) -> tuple[Tensor, Tensor | None]:
    """Up to `limit` images in random order, with the mean and deviation of ImageNet unless others are given."""
    files = images.image_files(root)
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed))[:limit].tolist()
    pixels = images.read_images([files[i][0] for i in order], config.size)
    config.say_what_is_taken("ImageNet's are taken")
    mean, std = _IMAGENET if config.mean is None or config.std is None else (config.mean, config.std)
    x = images.normalize(images.as_inputs(pixels), mean, std)
    labels = [label for _, label in files if label is not None]
    return x, torch.tensor([labels[i] for i in order]) if labels else None


def read_npz(
    path: Path, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Inputs and labels from the arrays `x` and `y`, or `jpeg`, `offsets` and `labels`.

    Bytes are pixels: n x height x width (x channels), which become normalized images. Other numbers are inputs already:
    whole ones are tokens, samples x length.
    """
    given = None if mean is None or std is None else (tuple(mean), tuple(std))
    return _read_npz(path, DataConfig(*given) if given else DataConfig())


def _read_npz(path: Path, config: DataConfig) -> tuple[Tensor, Tensor | None]:
    samples, labels = _samples_and_labels(_read_arrays(path), path)
    _check_numbers(samples, labels, path)
    y = None if labels is None else torch.from_numpy(labels.astype(np.int64))
    if samples.dtype != np.uint8:
        return _as_tensor(samples, path), y
    if samples.ndim == 3:
        samples = samples[..., None]
    if samples.ndim != 4:
        raise InputError(f"{path}: x has shape {samples.shape}; images are expected as n x height x width (x channels)")
    x = images.as_inputs(samples)
    config.say_what_is_taken("pixels are only scaled to [0, 1]")
    if config.mean is None or config.std is None:
        return x.contiguous(), y
    return images.normalize(x, config.mean, config.std), y


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays that mean something to us. Others are not read."""
    with open_file(path) as stream:
        try:
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise InputError(f"{path} is a single array; expected an npz file with named ones (numpy.savez)")
            known = [name for name in archive.files if name in _ARRAYS]
            if "x" not in known and not {"jpeg", "offsets"} <= set(known):
                found = ", ".join(archive.files[:_LISTED]) or "none"
                raise InputError(f"{path} has the arrays {found}; expected x (and y), or jpeg and offsets")
            _check_sizes(path, os.fstat(stream.fileno()).st_size, archive, known)
            arrays = {name: archive[name] for name in known}
        except InputError:
            raise
        except Exception as error:  # damaged archives raise many kinds
            raise InputError(f"{path} cannot be read as npz: {images.reason(error)}") from error
    for key, value in arrays.items():
        if not isinstance(value, np.ndarray):
            raise InputError(f"{path}: {key} is no array; expected an npz file of arrays (numpy.savez)")
    return arrays


def _check_sizes(path: Path, packed: int, archive: Any, names: Sequence[str]) -> None:
    """Refuse a small archive that would fill the memory. No more is unpacked of a member than the archive says."""
    members = [member for member in archive.zip.infolist() if member.filename.removesuffix(".npy") in names]
    check_unpacked(path, packed, sum(member.file_size for member in members))


def _samples_and_labels(arrays: dict[str, np.ndarray], path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    if {"jpeg", "offsets"} <= set(arrays):
        return images.decode_jpegs(arrays["jpeg"], arrays["offsets"], path), arrays.get("labels")
    return arrays["x"], arrays.get("y")


def _check_numbers(samples: np.ndarray, labels: np.ndarray | None, path: Path) -> None:
    for what, array, kinds in (("samples", samples, "uif"), ("labels", labels, "ui")):
        if array is not None and (array.dtype.kind not in kinds or not array.ndim):
            raise InputError(f"{path}: the {what} are {array.dtype} of shape {array.shape}; expected numbers")
    if labels is not None and len(labels) != len(samples):
        raise InputError(f"{path} has {len(samples)} samples and {len(labels)} labels")


def _as_tensor(array: np.ndarray, path: Path) -> Tensor:
    whole = array.dtype.kind in "ui"  # of any width, but embeddings read only a few of them
    try:
        return torch.from_numpy(array.astype(np.int64 if whole else array.dtype.newbyteorder("="), copy=False))
    except TypeError as error:  # such as float128
        raise InputError(f"{path}: the samples are {array.dtype}, which torch does not know; give float32") from error
