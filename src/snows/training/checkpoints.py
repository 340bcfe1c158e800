"""Finished epochs in a folder, so that an interrupted retraining can go on with the same bits."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from ..errors import SnowsWarning
from ..events import EpochEnded
from ..reading import is_folder, read_bytes
from ..results.files import write_whole
from ..results.folder import Folder
from ..results.journal import DIGEST, digest_for
from ..results.report import finite

_EPOCHS = "epochs"


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
        self._folder = None if folder is None else Folder(folder, dict(settings))
        if self._folder is not None:
            self._folder.check()
            self._folder.begin(_EPOCHS)

    def read(self) -> Checkpoint | None:
        """The newest checkpoint; None if there is none that is whole."""
        if self._folder is None:
            return None
        for file in reversed(_files(self._folder.path)):
            try:
                data = read_bytes(file)
                name, _, digest = file.stem.rpartition("-")
                if digest != digest_for(self._folder.settings, name, data):
                    raise ValueError("its content is not what was written for this epoch of this run")
                return _understood(load(data), _note(data))
            except Exception as error:  # an undamaged file may still be none of ours
                reason = str(error) or type(error).__name__
                warnings.warn(f"{file} is damaged ({reason}); it is not used", SnowsWarning, stacklevel=2)
        return None

    def write(self, checkpoint: Checkpoint) -> None:
        if self._folder is None:
            return
        tensors = {f"weights:{name}": tensor for name, tensor in checkpoint.weights.items()}
        tensors |= {f"momentum:{number}": tensor for number, tensor in checkpoint.momentum.items()}
        tensors |= {f"best:{name}": tensor for name, tensor in checkpoint.best.items()}
        copies = {  # safetensors refuses tensors that share memory
            name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
        }
        note = json.dumps(finite([asdict(epoch) for epoch in checkpoint.history]))
        data = save(copies, metadata={"note": note})
        older = _files(self._folder.path)
        name = f"epoch{checkpoint.epoch:05d}"
        digest = digest_for(self._folder.settings, name, data)
        new = self._folder.path / _EPOCHS / f"{name}-{digest}.safetensors"
        write_whole(new, data)
        for file in older:
            if file != new:
                file.unlink()


def kept_epochs(folder: Path | None, option: str, again: str) -> str:
    """What a retraining that was stopped has kept, and how to go on."""
    if folder is None:
        return f"nothing was saved; {option} keeps finished epochs"
    files = _files(folder)
    if not files:
        return f"no epoch was finished; {folder} holds nothing to continue from"
    epochs = int(files[-1].name.removeprefix("epoch").split("-")[0])
    return f"{epochs} {'epoch is' if epochs == 1 else 'epochs are'} kept in {folder}; the same {again} continues"


def _files(folder: Path) -> list[Path]:
    place = folder / _EPOCHS
    return sorted(place.glob(f"epoch{'[0-9]' * 5}-{'[0-9a-f]' * DIGEST}.safetensors")) if is_folder(place) else []


def _note(data: bytes) -> Any:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"]["note"])


def _understood(tensors: Mapping[str, Tensor], note: Any) -> Checkpoint:
    parts: dict[str, dict[str, Tensor]] = {"weights": {}, "momentum": {}, "best": {}}
    for key, tensor in tensors.items():
        kind, _, name = key.partition(":")
        parts[kind][name] = tensor
    momentum = {int(number): tensor for number, tensor in parts["momentum"].items()}
    history = tuple(EpochEnded(**{**entry, "loss": _number(entry["loss"])}) for entry in note)
    return Checkpoint(parts["weights"], momentum, parts["best"], history)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
