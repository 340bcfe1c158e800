"""Finished work in a folder, so that interrupted work can go on. A folder belongs to one set of settings."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.samples import Samples
from ..data.tensors import unusable
from ..data.weights import read_state
from ..devices.distributed.ranks import Ranks
from ..errors import InputError, shown
from ..masks.given import is_mask_file
from ..reading import entries, is_file, is_folder, read_json
from ..version import __version__
from .files import check_writable, make_folders, write_whole
from .storage import refuse_existing

SETTINGS, CELLS = "settings.json", "cells"
# Settings that are digests, whose values mean nothing to a reader.
_DIGESTS = {
    "weights": "the model's weights",
    "calibration": "the calibration samples",
    "test": "the test samples",
    "training": "the training samples",
    "held_out": "the held-out samples",
    "masks": "the masks",
    "trained": "the parameters that are trained",
    "teacher": "the teacher's weights",
}


@dataclass(frozen=True)
class Folder:
    """A folder with its settings, and a file for each finished piece of work."""

    path: Path
    settings: dict[str, Any]

    def check(self) -> None:
        """Refuse a folder of something else, or of other settings. Writes nothing."""
        file = self.path / SETTINGS
        if not is_file(file):
            if not self._was_just_begun():
                refuse_existing(self.path)
            return
        differences = _differences(_read(file), json.loads(json.dumps(self.settings)))
        if differences:
            raise InputError(
                f"{self.path} was made with other settings ({'; '.join(differences)}); "
                "choose another folder, or the settings it was made with"
            )

    def _was_just_begun(self) -> bool:
        """Whether a run stopped before it wrote the settings: then there are only empty folders."""
        found = (name for _, _, files in os.walk(self.path) for name in files)
        return is_folder(self.path) and all(name.startswith(".") for name in found)

    def cell(self, name: str) -> dict[str, Any] | None:
        """A finished cell, or None."""
        file = self.path / CELLS / name
        return _read(file) if is_file(file) else None

    def keep(self, name: str, cell: dict[str, Any]) -> None:
        self.begin(CELLS)
        self.write(f"{CELLS}/{name}", json.dumps(cell, indent=2, allow_nan=False))

    def require_writable(self) -> None:
        """Refuse, before any work, a folder that could not be written to later. Leaves nothing behind."""
        if not is_folder(self.path):
            return check_writable(self.path)
        try:
            for place in (self.path, *filter(is_folder, entries(self.path))):
                tempfile.TemporaryFile(prefix=".trial-", dir=place).close()
        except OSError as error:
            raise InputError(f"cannot write to {self.path}: {error.strerror}") from error

    def begin(self, inside: str) -> None:
        """Make the folder, its settings, and a folder inside, unless they are there."""
        try:
            make_folders(self.path / inside)
        except OSError as error:
            raise InputError(f"cannot write to {self.path}: {error.strerror}") from error
        self.require_writable()
        if not is_file(self.path / SETTINGS):
            self.write(SETTINGS, json.dumps(self.settings, indent=2))

    def write(self, name: str, text: str) -> None:
        write_whole(self.path / name, text.encode())


def cell_name(mask: str, pattern: str, snows: bool) -> str:
    """A readable name of a file, different for every cell."""
    words = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:40] for text in (mask, pattern))
    exact = hashlib.sha256(f"{mask}\0{pattern}".encode()).hexdigest()[:8]
    return f"{words}-{'with' if snows else 'without'}-{exact}.json"


def digest(value: Any) -> str:
    """SHA-256 of the types, shapes and bytes of all tensors in nested lists and mappings."""
    hasher = hashlib.sha256()
    _feed(hasher, value)
    return hasher.hexdigest()


def digest_of_samples(parts: Sequence[Samples], ranks: Ranks) -> str:
    """Of all samples in their order, however many ranks share them."""
    own: dict[int, str] = {}
    count = 0
    for samples in parts:
        own |= {count + index: digest(samples.stored(index)) for index in range(samples.count) if ranks.owns(index)}
        count += samples.count
    found: dict[int, str] = {}
    for digests in ranks.gathered(own):
        found |= digests
    return digest([found[index] for index in range(count)])


def versions() -> dict[str, str]:
    """Of what decides the bits of a run."""
    return {"snows": __version__, "torch": str(torch.__version__)}


def describe(value: Any) -> Any:
    """An argument of a run as JSON that is the same in every process: tensors by their values, no addresses."""
    if value is None or (isinstance(value, str) and not is_mask_file(value)):
        return value
    if isinstance(value, nn.Module):
        return digest(value.state_dict())
    if isinstance(value, Mapping):
        return digest(value)
    if is_mask_file(value):
        return digest(read_state(Path(value)))
    return list(value) if isinstance(value, list | tuple) else re.sub(r" at 0x[0-9a-fA-F]+", "", shown(value))


def _feed(hasher: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        problem = unusable(value)
        if problem is not None:
            raise InputError(f"a tensor of the data is {problem}; expected dense tensors with values")
        hasher.update(f"{value.dtype} {tuple(value.shape)}".encode())
        hasher.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            hasher.update(repr(key).encode())
            _feed(hasher, entry)
    elif isinstance(value, list | tuple):
        hasher.update(f"{len(value)} entries".encode())
        for entry in value:
            _feed(hasher, entry)
    else:
        hasher.update(repr(value).encode())


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_json(file)
    except InputError as error:
        raise InputError(f"{error}; remove it, or choose another folder") from error


def _differences(was: dict[str, Any], now: dict[str, Any], inside: str = "") -> list[str]:
    """One phrase for every setting that differs."""
    phrases = []
    for key in [*now, *(key for key in was if key not in now)]:
        old, new = was.get(key), now.get(key)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            phrases += _differences(old, new, f"{inside}{key} ")
        elif key in _DIGESTS and old is not None and new is not None:
            phrases.append(f"{_DIGESTS[key]} differ")
        else:
            phrases.append(f"{inside}{key.replace('_', ' ')} was {_show(old)} and is {_show(new)}")
    return phrases


def _show(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value)
