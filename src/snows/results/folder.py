"""Finished work on disk: what was interrupted goes on where it stopped, and two settings are never mixed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.weights import read_state
from ..errors import InputError
from ..masks.given import is_mask_file
from .files import write_whole
from .storage import refuse_existing

SETTINGS, CELLS = "settings.json", "cells"
# Settings that are digests: their values tell a reader nothing.
_DIGESTS = {"weights": "the model's weights", "calibration": "the calibration samples", "test": "the test samples"}


@dataclass(frozen=True)
class Folder:
    """A folder with the settings it was made with, and a file for each finished piece."""

    path: Path
    settings: dict[str, Any]

    def check(self) -> None:
        """Refuse a folder that holds something else, or cells made with other settings. Writes nothing."""
        file = self.path / SETTINGS
        if not file.is_file():
            if not self._is_unborn():
                refuse_existing(self.path)
            return
        changed = _differences(_read(file), _as_json(self.settings))
        if changed:
            raise InputError(
                f"{self.path} was made with other settings ({'; '.join(changed)}); "
                "choose another folder, or the settings it was made with"
            )

    def _is_unborn(self) -> bool:
        """Whether its making was cut off before the settings were written: nothing but empty folders."""
        return self.path.is_dir() and not any(f.is_file() and not f.name.startswith(".") for f in self.path.rglob("*"))

    def cell(self, name: str) -> dict[str, Any] | None:
        """A finished cell; None if it is still to be made."""
        file = self.path / CELLS / name
        return _read(file) if file.is_file() else None

    def keep(self, name: str, cell: dict[str, Any]) -> None:
        self.begin(CELLS)
        self.write(f"{CELLS}/{name}", json.dumps(cell, indent=2, allow_nan=False))

    def begin(self, inside: str) -> None:
        """Make the folder, with its settings and a folder inside for what comes, where it is not there yet."""
        try:
            (self.path / inside).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot write to {self.path}: {error.strerror}") from error
        if not (self.path / SETTINGS).is_file():
            self.write(SETTINGS, json.dumps(self.settings, indent=2))

    def write(self, name: str, text: str) -> None:
        write_whole(self.path / name, text.encode())


def cell_name(mask: str, pattern: str, snows: bool) -> str:
    """A name that a reader understands, and that is another one for every cell."""
    words = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:40] for text in (mask, pattern))
    exact = hashlib.sha256(f"{mask}\0{pattern}".encode()).hexdigest()[:8]
    return f"{words}-{'with' if snows else 'without'}-{exact}.json"


def digest(value: Any) -> str:
    """SHA-256 of all tensors in nested lists and mappings: types, shapes and bytes."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()


def describe(value: Any) -> Any:
    """An argument of a run, the same in every process: values, not addresses."""
    if value is None or (isinstance(value, str) and not is_mask_file(value)):
        return value
    if isinstance(value, nn.Module):
        return digest(value.state_dict())
    if isinstance(value, Mapping):
        return digest(value)
    if is_mask_file(value):
        return digest(read_state(Path(value)))
    return list(value) if isinstance(value, list | tuple) else re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        found.update(f"{value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            found.update(repr(key).encode())
            _feed(found, entry)
    elif isinstance(value, list | tuple):
        found.update(f"{len(value)} entries".encode())
        for entry in value:
            _feed(found, entry)
    else:
        found.update(repr(value).encode())


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # no JSON, or no text at all
        raise InputError(f"cannot read {file}: {error}; remove it, or choose another folder") from error
    if not isinstance(data, dict):
        raise InputError(f"cannot read {file}: expected a JSON object; remove it, or choose another folder")
    return data


def _as_json(data: Any) -> Any:
    return json.loads(json.dumps(data))


def _differences(was: dict[str, Any], now: dict[str, Any], inside: str = "") -> list[str]:
    """What differs, in words."""
    found = []
    for key in [*now, *(key for key in was if key not in now)]:
        old, new = was.get(key), now.get(key)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new, f"{inside}{key} ")
        elif key in _DIGESTS and old is not None and new is not None:
            found.append(f"{_DIGESTS[key]} are others")
        else:
            found.append(f"{inside}{key.replace('_', ' ')} was {_show(old)} and is {_show(new)}")
    return found


def _show(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value)
