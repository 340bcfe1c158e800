"""What the report has of a retraining."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..events import EpochEnded


@dataclass
class Retraining:
    """How `snows.retrain` trained a network further.

    Attributes:
        settings: Its figures, by name.
        teacher: The class of the dense network; None: labels.
        samples: Trained on in each epoch. None: nobody knows, as with a loader.
        held_out_samples: They judge the epochs.
        measure: The figure of the held-out samples by which `best_epoch` was chosen.
        seed: Of the order of samples, of random views and dropout.
        device: Where it worked.
        history: Every epoch. Epoch 0 is the network before retraining.
        seconds: Of the last call.
        finished: Whether it has ended.
        best_epoch: The one whose weights are kept; 0 where no epoch was better than the network before.
        recalled_epochs: How many an earlier, interrupted call had finished. Their time is not in `seconds`.
        before: Figures of the held-out samples before retraining.
        after: These figures with the weights that are kept.
    """

    settings: Mapping[str, Any]
    teacher: str | None
    samples: int | None
    held_out_samples: int
    measure: str
    seed: int
    device: str
    history: list[EpochEnded] = field(default_factory=list)
    seconds: float = 0.0
    finished: bool = False

    @property
    def best_epoch(self) -> int:
        return max((ended.epoch for ended in self.history if ended.best), default=0)

    @property
    def recalled_epochs(self) -> int:
        return sum(ended.recalled for ended in self.history if ended.epoch)

    @property
    def before(self) -> Mapping[str, float]:
        return self.history[0].held_out

    @property
    def after(self) -> Mapping[str, float]:
        return self.history[self.best_epoch].held_out
