"""The finished layers of a run, kept in a folder, so that an interrupted run can go on.

The name of a file ends with a digest of its content and of what it is for: the run, the sweep and the layer. Damaged
and exchanged files are noticed, and such a layer is solved again, with all layers after it. Everything random depends
on the seed, the sweep and the layer alone, so a resumed run ends with the same weights as an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor

from ..devices.distributed.ranks import ALONE, Ranks
from ..errors import InputError, SnowsWarning
from ..events import SolveReport
from ..masks import Choice
from ..reading import entries, is_file, is_folder, read_bytes
from ..solve.layer import SolvedLayer
from .files import write_whole
from .folder import Folder

_LAYERS = "layers"
DIGEST = 32  # hexadecimal digits
_T = TypeVar("_T")


class Journal:
    """Keeps nothing: every layer has to be solved."""

    recalled = 0  # number of solves that an earlier run had finished

    def recall(self, sweep: int, index: int) -> SolvedLayer | None:
        """What an earlier run has kept for group `index` of a sweep, or None."""
        return None

    def record(self, sweep: int, index: int, solved: SolvedLayer) -> None:
        """Keep a finished group."""

    def recall_choice(self, sweep: int) -> Choice | None:
        """The masks of all layers with which a sweep began in an earlier run, or None."""
        return None

    def record_choice(self, sweep: int, choice: Choice) -> None:
        """Keep the masks with which a sweep begins."""


class DiskJournal(Journal):
    """Keeps every finished layer in a folder, which belongs to a run with these settings. Others are refused."""

    def __init__(self, path: Path, settings: dict[str, Any], device: torch.device) -> None:
        self.folder = Folder(path, settings)
        self.folder.check()
        self.device = device
        self._gap = False  # whether a layer was missing or damaged: nothing after it is used
        self.folder.begin(_LAYERS)
        for path in entries(self._place):
            if not is_file(path):
                raise InputError(f"{path} is no regular file, so none of ours; remove it or choose another folder")

    def recall(self, sweep: int, index: int) -> SolvedLayer | None:
        solved = self._read(_layer(sweep, index), _as_solved)
        if solved is None:
            self._gap = True
        else:
            self.recalled += 1
        return solved

    def record(self, sweep: int, index: int, solved: SolvedLayer) -> None:
        facts = dataclasses.asdict(solved.solve)  # JSON has no NaN
        note = {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in facts.items()}
        self._write(_layer(sweep, index), _named(solved.masks, solved.weights), json.dumps(note))

    def recall_choice(self, sweep: int) -> Choice | None:
        return self._read(_start(sweep), _as_choice)

    def record_choice(self, sweep: int, choice: Choice) -> None:
        self._write(_start(sweep), _named(choice.masks, choice.weights), "")

    def _write(self, name: str, tensors: dict[str, Tensor], note: str) -> None:
        copies = {  # safetensors refuses tensors that share memory
            key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()
        }
        data = save(copies, metadata={"note": note})
        for old in self._files(name):
            old.unlink()
        write_whole(self._place / f"{name}-{digest_for(self.folder.settings, name, data)}.safetensors", data)

    def _read(self, name: str, understand: Callable[[dict[str, Tensor], str], _T]) -> _T | None:
        """What the tensors and the note of a file mean; None if it is missing or damaged."""
        files = self._files(name)
        if not files or self._gap:
            return None
        try:
            data = read_bytes(files[0])
            if not files[0].stem.endswith(digest_for(self.folder.settings, name, data)):
                raise ValueError("its content is not what was written for this layer of this run")
            tensors = {key: tensor.to(self.device) for key, tensor in load(data).items()}
            note = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["note"]
            return understand(tensors, note)
        except Exception as error:  # an undamaged file may still be none of ours
            reason = str(error) or type(error).__name__
            warnings.warn(f"{files[0]} is damaged ({reason}); it is done again", SnowsWarning, stacklevel=2)
            return None

    def _files(self, name: str) -> list[Path]:
        return _files(self.folder.path, name)

    @property
    def _place(self) -> Path:
        return self.folder.path / _LAYERS


class SharedJournal(Journal):
    """The journal of rank 0, which reads for all ranks and writes alone."""

    def __init__(self, open_own: Callable[[], Journal], device: torch.device, ranks: Ranks) -> None:
        opened: list[Journal] = []
        ranks.from_first(lambda: opened.append(open_own()))
        self._own, self._device, self._ranks = opened[0] if ranks.is_first else Journal(), device, ranks

    def recall(self, sweep: int, index: int) -> SolvedLayer | None:
        solved = self._ranks.from_first(lambda: self._own.recall(sweep, index))
        self.recalled += solved is not None
        return solved and dataclasses.replace(
            solved, weights=self._here(solved.weights), masks=self._here(solved.masks)
        )

    def record(self, sweep: int, index: int, solved: SolvedLayer) -> None:
        self._ranks.from_first(lambda: self._own.record(sweep, index, solved))

    def recall_choice(self, sweep: int) -> Choice | None:
        choice = self._ranks.from_first(lambda: self._own.recall_choice(sweep))
        return choice and Choice(self._here(choice.masks), self._here(choice.weights))

    def record_choice(self, sweep: int, choice: Choice) -> None:
        self._ranks.from_first(lambda: self._own.record_choice(sweep, choice))

    def _here(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self._device) for name, tensor in tensors.items()}


def open_journal(
    path: str | Path | None, settings: Callable[[], dict[str, Any]], device: torch.device, ranks: Ranks = ALONE
) -> Journal:
    """A journal in a folder if there is a path. Only then are settings called: they take digests of all data."""
    if path is None:
        return Journal()
    facts = settings()
    if ranks.size == 1:
        return DiskJournal(Path(path), facts, device)
    return SharedJournal(lambda: DiskJournal(Path(path), facts, torch.device("cpu")), device, ranks)


def count_solves(folder: Path) -> int:
    """How many solves of layers a journal keeps, over all sweeps. Layers that are solved together count once."""
    return len(_files(folder, "sweep*-layer*"))


def kept_solves(folder: Path | None, option: str, again: str) -> str:
    """What a run that was stopped has kept, and how to go on."""
    if folder is None:
        return f"nothing was saved; {option} keeps finished layers"
    solves = count_solves(folder)
    if not solves:
        return f"no layer was finished; {folder} holds nothing to continue from"
    return f"{solves} layer {'solve is' if solves == 1 else 'solves are'} kept in {folder}; the same {again} continues"


def _files(folder: Path, name: str) -> list[Path]:
    place = folder / _LAYERS
    return sorted(place.glob(f"{name}-{'[0-9a-f]' * DIGEST}.safetensors")) if is_folder(place) else []


def _named(masks: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Masks and weights in one table, as `_as_choice` reads it."""
    named = {f"mask:{name}": mask for name, mask in masks.items()}
    return named | {f"weight:{name}": weight for name, weight in weights.items()}


def _as_choice(tensors: Mapping[str, Tensor], note: str) -> Choice:
    parts: dict[str, dict[str, Tensor]] = {"mask": {}, "weight": {}}
    for key, tensor in tensors.items():
        kind, _, name = key.partition(":")
        parts[kind][name] = tensor
    return Choice({name: mask.bool() for name, mask in parts["mask"].items()}, parts["weight"])


def _as_solved(tensors: Mapping[str, Tensor], note: str) -> SolvedLayer:
    facts: dict[str, Any] = {key: math.nan if value is None else value for key, value in json.loads(note).items()}
    facts |= {"losses": tuple(facts["losses"]), "cg_residuals": tuple(map(tuple, facts["cg_residuals"]))}
    choice = _as_choice(tensors, note)
    return SolvedLayer(choice.weights, choice.masks, SolveReport(**facts))


def _layer(sweep: int, index: int) -> str:
    return f"sweep{sweep:02d}-layer{index:04d}"


def _start(sweep: int) -> str:
    return f"sweep{sweep:02d}-start"


def digest_for(settings: Mapping[str, Any], name: str, data: bytes) -> str:
    """Of a file's content, of the run that it belongs to, and of what it is for in this run."""
    run = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(f"{run}\0{name}\0".encode() + data).hexdigest()[:DIGEST]
