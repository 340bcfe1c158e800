"""Rows of the table of evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..data.sources import Data
    from ..evaluation.metrics import Metric


@dataclass(frozen=True)
class Judge:
    """What networks are measured with.

    read    their test samples
    dense   the dense network to compare with, or its scores; None: labels alone
    metric  the user's own figure, in place of all others
    """

    read: Data
    dense: nn.Module | Tensor | None
    metric: Metric | None = None

    def row(self, name: str, network: nn.Module) -> dict[str, Any]:
        """A network's name, and its figures on the test samples."""
        from ..evaluation.classes import evaluate

        dense = self.dense if self.metric is None else None
        return {"network": name, **evaluate(network, self.read.test, self.read.test_labels, dense, metric=self.metric)}
