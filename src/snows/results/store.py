"""Tensors of finished work, each piece in a file of its own, in a folder that belongs to one set of settings.

The name of a file ends with a digest of its content and of what it is for: the settings, and the piece of work. Damaged
and exchanged files are noticed, and such a piece is done again.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor

from ..errors import InputError, SnowsWarning
from ..reading import entries, is_file, is_folder, read_bytes
from .files import write_whole
from .folder import Folder

_DIGEST = 32  # hexadecimal digits
_T = TypeVar("_T")

Parts = Mapping[str, Mapping[Any, Tensor]]  # tensors by kind and name


class Store:
    """The files in one place of a folder. A folder of something else, or of other settings, is refused."""

    def __init__(self, folder: Folder, inside: str) -> None:
        folder.check()
        folder.begin(inside)
        self._settings, self.place = folder.settings, folder.path / inside
        for path in entries(self.place):
            if not is_file(path):
                raise InputError(f"{path} is no regular file, so none of ours; remove it or choose another folder")

    def write(self, name: str, parts: Parts, note: Any) -> None:
        """Keep the tensors of a piece of work, and a note for JSON (NaN is taken), in place of what was kept for it."""
        copies = {  # safetensors refuses tensors that share memory
            f"{kind}:{key}": tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for kind, tensors in parts.items()
            for key, tensor in tensors.items()
        }
        data = save(copies, metadata={"note": json.dumps(note)})
        self.remove(name)
        write_whole(self.place / f"{name}-{digest_for(self._settings, name, data)}.safetensors", data)

    def read(self, name: str, understand: Callable[[dict[str, dict[str, Tensor]], Any], _T]) -> _T | None:
        """What the tensors and the note of a piece of work mean; None if it is missing or damaged."""
        files = _files(self.place, name)
        if not files:
            return None
        try:
            data = read_bytes(files[0])
            if not files[0].stem.endswith(digest_for(self._settings, name, data)):
                raise ValueError(f"its content is not what was written for {name} of this run")
            parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
            for key, tensor in load(data).items():
                kind, _, rest = key.partition(":")
                parts[kind][rest] = tensor
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            return understand(parts, json.loads(header["__metadata__"]["note"]))
        except Exception as error:  # an undamaged file may still be none of ours
            reason = str(error) or type(error).__name__
            warnings.warn(f"{files[0]} is damaged ({reason}); it is done again", SnowsWarning, stacklevel=2)
            return None

    def remove(self, name: str) -> None:
        for file in _files(self.place, name):
            file.unlink()


def kept(place: Path, names: str) -> list[str]:
    """What is kept in a place, in the order of the names; `names` is a glob for them."""
    return [file.stem.rpartition("-")[0] for file in _files(place, names)]


def _files(place: Path, names: str) -> list[Path]:
    return sorted(place.glob(f"{names}-{'[0-9a-f]' * _DIGEST}.safetensors")) if is_folder(place) else []


def digest_for(settings: Mapping[str, Any], name: str, data: bytes) -> str:
    """Of a file's content, of the run that it belongs to, and of what it is for in this run."""
    run = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(f"{run}\0{name}\0".encode() + data).hexdigest()[:_DIGEST]
