"""A run in TensorBoard."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from ..devices.usage import memory_in_use
from ..errors import InputError
from ..events import (
    Counted,
    Distilled,
    DistillStep,
    EpochEnded,
    Event,
    LayerSolved,
    RetrainingStarted,
    RunFinished,
    RunStarted,
    TrainingStep,
    Warned,
)
from ..results.files import make_folders
from .files import Writer, opening

_OF_A_SOLVE = ("loss_masked", "loss_start", "loss", "held_out_masked", "held_out", "cg_steps", "seconds")


class TensorBoard(Writer):
    """Writes losses, CG steps, time and memory of every solved layer, the last stage, epochs, and warnings.

    Under "layers" they are in the order of the run; under a layer's own name in the order of the sweeps. Events that
    are `Counted`, such as those of a loop of your own, give all their numbers. Needs the package tensorboard.

    Args:
        folder: Where. Look at it with `tensorboard --logdir FOLDER`.

    Raises:
        InputError: tensorboard is not installed, or the folder cannot be written.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(Path(folder))
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InputError(
                "tensorboard is needed to write for TensorBoard; install it with: pip install 'snows[tensorboard]'"
            ) from error
        with opening(self.path):
            make_folders(self.path)
            self._board: Any = SummaryWriter(str(self.path))
        self._warnings = 0

    def __call__(self, event: Event) -> None:
        if self.failed:
            return
        with self.writing():
            self._add(event)

    def close(self) -> None:
        with self.writing():
            self._board.close()

    def _add(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._board.add_text(
                    "run", f"{event}, mask {event.mask}, {len(event.layers)} layers, on {event.device}"
                )
            case RetrainingStarted():
                self._board.add_text("retraining", str(event))
            case Warned():
                self._board.add_text("warnings", event.message, self._warnings)
                self._warnings += 1
            case LayerSolved():
                self._add_solve(event)
            case Distilled():
                self._scalar("last stage/loss", event.loss_before, 0)
                self._scalar("last stage/loss", event.loss, event.steps)
            case EpochEnded():
                self._add_epoch(event)
            case Counted() if not isinstance(event, DistillStep | TrainingStep):  # such steps have no figures
                self._add_numbers(event)
            case RunFinished():
                self._scalar("run/seconds", event.seconds, 0)
        if isinstance(event, LayerSolved | Distilled | EpochEnded | RunFinished):
            self._board.flush()

    def _add_solve(self, event: LayerSolved) -> None:
        place = event.sweep * event.total + event.index
        for name in _OF_A_SOLVE:
            self._scalar(f"layers/{name}", getattr(event.solve, name), place)
        self._scalar(f"{event.layer}/loss", event.solve.loss, event.sweep + 1)
        self._scalar("layers/memory_gib", (memory_in_use() or math.nan) / 2**30, place)

    def _add_epoch(self, event: EpochEnded) -> None:
        held_out = {f"held_out_{name}": value for name, value in event.held_out.items()}
        for name, value in {"lr": event.lr, "loss": event.loss, **held_out}.items():
            self._scalar(f"retraining/{name}", value, event.epoch)

    def _add_numbers(self, event: Counted) -> None:
        for field in dataclasses.fields(event):
            value = getattr(event, field.name)
            if field.name not in ("step", "steps") and isinstance(value, int | float):
                self._scalar(f"{type(event).__name__}/{field.name}", value, event.step)

    def _scalar(self, name: str, value: float, step: int) -> None:
        if math.isfinite(value):
            self._board.add_scalar(name, value, step)
