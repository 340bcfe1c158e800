"""The finished layers of a run, kept in a folder, so that an interrupted run can go on.

A layer whose file is damaged is solved again, with all layers after it. Everything random depends on the seed, the
sweep and the layer alone, so a resumed run ends with the same weights as an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..devices.distributed.ranks import ALONE, Ranks
from ..events import SolveReport
from ..masks import Choice
from ..solve.layer import SolvedLayer
from .folder import Folder
from .store import Store, kept

_LAYERS = "layers"


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
        self.device = device
        self._store = Store(self.folder, _LAYERS)
        self._gap = False  # whether a layer was missing or damaged: nothing after it is used

    def recall(self, sweep: int, index: int) -> SolvedLayer | None:
        solved = None if self._gap else self._store.read(_layer(sweep, index), self._as_solved)
        if solved is None:
            self._gap = True
        else:
            self.recalled += 1
        return solved

    def record(self, sweep: int, index: int, solved: SolvedLayer) -> None:
        parts = {"mask": solved.masks, "weight": solved.weights}
        self._store.write(_layer(sweep, index), parts, dataclasses.asdict(solved.solve))

    def recall_choice(self, sweep: int) -> Choice | None:
        return None if self._gap else self._store.read(_start(sweep), self._as_choice)

    def record_choice(self, sweep: int, choice: Choice) -> None:
        self._store.write(_start(sweep), {"mask": choice.masks, "weight": choice.weights}, None)

    def _as_choice(self, parts: Mapping[str, Mapping[str, Tensor]], note: Any) -> Choice:
        masks, weights = (
            {name: tensor.to(self.device) for name, tensor in parts[kind].items()} for kind in ("mask", "weight")
        )
        return Choice({name: mask.bool() for name, mask in masks.items()}, weights)

    def _as_solved(self, parts: Mapping[str, Mapping[str, Tensor]], note: Any) -> SolvedLayer:
        facts = {**note, "losses": tuple(note["losses"]), "cg_residuals": tuple(map(tuple, note["cg_residuals"]))}
        choice = self._as_choice(parts, note)
        return SolvedLayer(choice.weights, choice.masks, SolveReport(**facts))


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
    return len(kept(folder / _LAYERS, "sweep*-layer*"))


def kept_solves(folder: Path | None, option: str, again: str) -> str:
    """What a run that was stopped has kept, and how to go on."""
    if folder is None:
        return f"nothing was saved; {option} keeps finished layers"
    solves = count_solves(folder)
    if not solves:
        return f"no layer was finished; {folder} holds nothing to continue from"
    return f"{solves} layer {'solve is' if solves == 1 else 'solves are'} kept in {folder}; the same {again} continues"


def _layer(sweep: int, index: int) -> str:
    return f"sweep{sweep:02d}-layer{index:04d}"


def _start(sweep: int) -> str:
    return f"sweep{sweep:02d}-start"
