"""Finished epochs in a folder, so that an interrupted retraining can go on with the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..events import EpochEnded
from ..results.folder import Folder
from ..results.store import Parts, Store, kept

_EPOCHS = "epochs"
_NAMES = f"epoch{'[0-9]' * 5}"


@dataclass(frozen=True)
class Checkpoint:
    """The state after an epoch. `momentum` is by the number of the parameter, `best` are the weights to end with."""

    weights: Mapping[str, Tensor]
    momentum: Mapping[int, Tensor]
    best: Mapping[str, Tensor]
    history: tuple[EpochEnded, ...]

    @property
    def epoch(self) -> int:
        return self.history[-1].epoch


class Checkpoints:
    """The newest checkpoint of one retraining, in a folder that belongs to it. Without a folder nothing is kept."""

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]) -> None:
        self._store = None if folder is None else Store(Folder(folder, dict(settings)), _EPOCHS)

    def read(self) -> Checkpoint | None:
        """The newest checkpoint; None if there is none that is whole."""
        if self._store is None:
            return None
        found = (self._store.read(name, _understood) for name in reversed(kept(self._store.place, _NAMES)))
        return next((checkpoint for checkpoint in found if checkpoint is not None), None)

    def write(self, checkpoint: Checkpoint) -> None:
        if self._store is None:
            return
        older = kept(self._store.place, _NAMES)
        parts: Parts = {"weights": checkpoint.weights, "momentum": checkpoint.momentum, "best": checkpoint.best}
        name = f"epoch{checkpoint.epoch:05d}"
        self._store.write(name, parts, [asdict(epoch) for epoch in checkpoint.history])
        for each in older:
            if each != name:
                self._store.remove(each)


def kept_epochs(folder: Path | None, option: str, again: str) -> str:
    """What a retraining that was stopped has kept, and how to go on."""
    if folder is None:
        return f"nothing was saved; {option} keeps finished epochs"
    names = kept(folder / _EPOCHS, _NAMES)
    if not names:
        return f"no epoch was finished; {folder} holds nothing to continue from"
    epochs = int(names[-1].removeprefix("epoch"))
    return f"{epochs} {'epoch is' if epochs == 1 else 'epochs are'} kept in {folder}; the same {again} continues"


def _understood(parts: Mapping[str, Mapping[str, Tensor]], note: Any) -> Checkpoint:
    momentum = {int(number): tensor for number, tensor in parts["momentum"].items()}
    history = tuple(EpochEnded(**entry) for entry in note)
    if [ended.epoch for ended in history] != list(range(len(history))) or not history[:1] or not history[0].best:
        raise ValueError("it has not all epochs")
    return Checkpoint(parts["weights"], momentum, parts["best"], history)
