"""Rows of the table of evaluations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..data.sources import Data


def evaluation_row(name: str, network: nn.Module, read: Data, dense: nn.Module | Tensor | None) -> dict[str, Any]:
    """A network's name, and its figures on the test samples."""
    from ..evaluation.classes import evaluate as measure

    assert read.test is not None
    return {"network": name, **measure(network, read.test, read.test_labels, dense)}
