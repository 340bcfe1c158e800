"""Folders with saved results: what may be replaced, `snows.load` and `snows.load_masks`."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import torch
from torch import Tensor, nn

from ..data.samples import check_flag
from ..data.usable import require_module, require_unwrapped
from ..data.weights import fill, read_state
from ..errors import InputError
from ..reading import as_path, entries, is_folder, look
from .files import check_writable, mend
from .manifest import FILES, MANIFEST, MASKS, REPORT, model_file, read_manifest, require_unchanged
from .recorded import recorded_model


def check_output(directory: Path, force: bool = False, resume: Path | None = None) -> None:
    """Refuse, before any work, a folder that a result could not be saved to in the end."""
    refuse_existing(directory, force)
    check_writable(directory)
    if resume is not None and os.path.realpath(directory) in (
        os.path.realpath(folder) for folder in (resume, *resume.absolute().parents)
    ):
        raise InputError(
            f"the result is to go to {directory}, where finished work is kept ({resume}); choose another folder"
        )


def refuse_existing(directory: Path, force: bool = False) -> None:
    """Refuse a folder that is not empty. With `force`, one that holds a saved result and nothing else is accepted."""
    mend(directory)
    found = look(directory)
    if found is None or (is_folder(directory) and not entries(directory)):
        return
    if not is_folder(directory):
        raise InputError(f"{directory} is no folder; choose another folder or remove it first")
    if not force:
        raise InputError(f"{directory} exists and is not empty; choose another folder or remove it first")
    ours = _our_files(directory)
    if not ours:
        raise InputError(
            f"{directory} has no whole manifest of snows, so nothing says which files may be replaced; "
            "choose another folder or remove it first"
        )
    others = [path.name for path in entries(directory) if path.name not in ours or not _is_plain(path)]
    if others:
        raise InputError(
            f"{directory} holds more than a result of snows ({', '.join(others[:3])}), which would be lost; "
            "choose another folder or remove it first"
        )


def _is_plain(path: Path) -> bool:
    """Whether it is a regular file and no link to one."""
    return stat.S_ISREG(path.lstat().st_mode)


def _our_files(directory: Path) -> frozenset[str]:
    """What the manifest lists, and the manifest; nothing if it is not as it was written."""
    try:
        return FILES & {*read_manifest(directory), MANIFEST}
    except InputError:
        return frozenset()


def load(directory: str | Path, model: nn.Module | None = None, trust: bool = False) -> nn.Module:
    """Load the weights of a saved result into a model.

    The files that are read must be as they were written: their checksums are compared with the manifest. (Folders of
    versions of snows that wrote no manifest are not checked.) `snows.verify` checks all files and their contents.

    Args:
        directory: A folder that `Result.save` or `snows prune --out` wrote.
        model: A module to fill. It may hold masks in its own way (torch.nn.utils.prune, NVIDIA's ASP). Default: a new
            model of the name that the folder records, such as "torchvision:resnet50".
        trust: Whether to run code that the folder names ("file.py:factory") to build the model.

    Returns:
        The filled module.

    Raises:
        InputError: A file is missing, damaged or exchanged; the weights do not fit the model; or there is no model, and
            the folder records none, or one that only code can build and `trust` is false.

    Example:
        >>> import tempfile, torch, snows
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> result = snows.prune(model, torch.randn(64, 8), "2:4", layers="0", progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     loaded = snows.load(result.save(f"{folder}/pruned"), model)
        >>> int((loaded[0].weight == 0).sum())
        32
    """
    folder = as_path(directory, "directory")
    check_flag("trust", trust)
    if model is not None:
        require_module(model, "model")
        require_unwrapped(model)
    mend(folder)
    file = model_file(folder)
    require_unchanged(folder, [file.name, REPORT] if model is None else [file.name])
    if model is None:
        model = recorded_model(folder, trust, can_trust=True)
    fill(model, read_state(file), str(file))
    return model


def load_masks(directory: str | Path) -> dict[str, Tensor]:
    """The masks of a saved result.

    The file must be as it was written: its checksum is compared with the manifest.

    Args:
        directory: A folder that `Result.save` or `snows prune --out` wrote.

    Returns:
        {parameter name: bool tensor, True = kept}, on the CPU.

    Raises:
        InputError: The file is missing, damaged or exchanged, or holds no masks.

    Example:
        >>> import tempfile, torch, snows
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> result = snows.prune(model, torch.randn(64, 8), "2:4", layers="0", progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     masks = snows.load_masks(result.save(f"{folder}/pruned"))
        >>> masks["0.weight"].equal(result.masks["0.weight"])
        True
    """
    folder = as_path(directory, "directory")
    mend(folder)
    if not is_folder(folder):
        raise InputError(f"there is no folder {folder}; expected one that Result.save or snows prune --out wrote")
    require_unchanged(folder, [MASKS])
    masks = read_state(folder / MASKS)
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            raise InputError(f"{folder / MASKS} is no file of masks: {name} is {mask.dtype}; expected packed bools")
    return masks
