"""What a run has finished, layer by layer. Here in nobody's memory; `state.py` keeps it on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..events import SolveReport
from ..masks import Choice


@dataclass(frozen=True)
class Entry:
    """One layer, or a group solved together, after one sweep: by parameter name."""

    weights: dict[str, Tensor]
    masks: dict[str, Tensor]
    solve: SolveReport


def laid_out(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As they come back from a file: sums over another layout round otherwise, so a resumed run would end elsewhere."""
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


class Journal:
    """Remembers nothing: every layer is to be done."""

    recalled = 0  # solves that were not done again

    def recall(self, sweep: int, index: int) -> Entry | None:
        return None

    def record(self, sweep: int, index: int, entry: Entry) -> None:
        pass

    def recall_choice(self, sweep: int) -> Choice | None:
        """Masks of all layers that this sweep began with."""
        return None

    def record_choice(self, sweep: int, choice: Choice) -> None:
        pass
