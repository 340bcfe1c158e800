"""What a run has finished, on disk, so that an interrupted run can go on.

A file's name ends with a digest of its content, so a damaged one is known by itself: that layer is done again, and
those behind it. All that is random depends on seed, sweep and layer alone, so a resumed run ends where an
uninterrupted one does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor

from ..errors import SnowsWarning
from ..events import SolveReport
from ..masks import Choice
from ..solve.layer import SolvedLayer
from .files import write_whole
from .folder import Folder
from .journal import Journal

_LAYERS = "layers"
_DIGEST = 32  # hexadecimal digits
_T = TypeVar("_T")


class DiskJournal(Journal):
    """One folder for one run. Made with other settings, it is refused."""

    def __init__(self, path: Path, settings: dict[str, Any], device: torch.device) -> None:
        self.folder = Folder(path, settings)
        self.folder.check()
        self.device = device
        self.damaged = False  # from the first damaged file on, all is done again
        if not (path / _LAYERS).is_dir():
            self.folder.begin(_LAYERS)

    def recall(self, sweep: int, index: int) -> SolvedLayer | None:
        found = self._read(_name(sweep, index), _as_entry)
        if found is None:
            self.damaged = True  # nothing behind a gap is trusted
        else:
            self.recalled += 1
        return found

    def record(self, sweep: int, index: int, entry: SolvedLayer) -> None:
        solve = {key: None if value != value else value for key, value in dataclasses.asdict(entry.solve).items()}
        self._write(_name(sweep, index), _named(entry.masks, entry.weights), json.dumps(solve))

    def recall_choice(self, sweep: int) -> Choice | None:
        return self._read(_start(sweep), _as_choice)

    def record_choice(self, sweep: int, choice: Choice) -> None:
        self._write(_start(sweep), _named(choice.masks, choice.weights), "")

    def _write(self, name: str, tensors: dict[str, Tensor], note: str) -> None:
        plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        data = save(plain, metadata={"note": note})
        for old in self._files(name):
            old.unlink()
        write_whole(self._place / f"{name}-{_digest(data)}.safetensors", data)

    def _read(self, name: str, understand: Callable[[dict[str, Tensor], str], _T]) -> _T | None:
        """What the tensors and the note of a file say; None if it is not there, or damaged."""
        files = self._files(name)
        if not files or self.damaged:
            return None
        try:
            data = files[0].read_bytes()
            if not files[0].stem.endswith(_digest(data)):
                raise ValueError("its content is not what was written")
            tensors = {key: tensor.to(self.device) for key, tensor in load(data).items()}
            note = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["note"]
            return understand(tensors, note)
        except Exception as error:  # also a file that is as it was written, but not by us
            reason = str(error) or type(error).__name__
            warnings.warn(f"{files[0]} is damaged ({reason}); it is done again", SnowsWarning, stacklevel=2)
            return None

    def _files(self, name: str) -> list[Path]:
        return sorted(self._place.glob(f"{name}-{'[0-9a-f]' * _DIGEST}.safetensors"))

    @property
    def _place(self) -> Path:
        return self.folder.path / _LAYERS


def open_journal(path: str | Path | None, settings: Callable[[], dict[str, Any]], device: torch.device) -> Journal:
    """A journal on disk where there is a path. Settings take digests of all data, so they are asked for only then."""
    return Journal() if path is None else DiskJournal(Path(path), settings(), device)


def _as_entry(tensors: dict[str, Tensor], note: str) -> SolvedLayer:
    facts: dict[str, Any] = {k: float("nan") if v is None else v for k, v in json.loads(note).items()}
    choice = _as_choice(tensors, note)
    return SolvedLayer(choice.weights, choice.masks, SolveReport(**facts))


def _named(masks: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {f"mask:{name}": mask for name, mask in masks.items()}
    return named | {f"weight:{name}": weight for name, weight in weights.items()}


def _as_choice(tensors: dict[str, Tensor], note: str) -> Choice:
    parts: dict[str, dict[str, Tensor]] = {"mask": {}, "weight": {}}
    for key, tensor in tensors.items():
        kind, _, name = key.partition(":")
        parts[kind][name] = tensor
    return Choice({name: mask.bool() for name, mask in parts["mask"].items()}, parts["weight"])


def _name(sweep: int, index: int) -> str:
    return f"sweep{sweep:02d}-layer{index:04d}"


def _start(sweep: int) -> str:
    return f"sweep{sweep:02d}-start"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGEST]
