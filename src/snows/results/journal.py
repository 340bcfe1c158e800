"""What a run has finished, layer by layer. This journal remembers nothing; `disk_journal` keeps it on disk."""

from __future__ import annotations

from ..masks import Choice
from ..solve.layer import SolvedLayer


class Journal:
    """Remembers nothing: every layer is to be done."""

    recalled = 0  # solves that were not done again

    def recall(self, sweep: int, index: int) -> SolvedLayer | None:
        return None

    def record(self, sweep: int, index: int, entry: SolvedLayer) -> None:
        pass

    def recall_choice(self, sweep: int) -> Choice | None:
        """Masks of all layers that this sweep began with."""
        return None

    def record_choice(self, sweep: int, choice: Choice) -> None:
        pass
