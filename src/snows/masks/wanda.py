"""Wanda: weight times the norm of its input."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..patterns import Pattern
from .base import Choice, Reads


@dataclass(frozen=True)
class Wanda:
    """Removes the weights with the smallest products of magnitude and input norm, within each output row.

    Sun et al. 2023, "A Simple and Effective Pruning Approach for Large Language Models". It gives no new weights.

    Args:
        reads: Which inputs the norms are of, see `snows.LayerMethod`.

    Example:
        >>> import torch, snows
        >>> weight, inputs = torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[0.1, 1.0, 1.0]])
        >>> gram = (inputs.T @ inputs)[None]
        >>> snows.Wanda().choose_layer("w", weight, gram, snows.Unstructured(1 / 3)).masks["w"]
        tensor([[False,  True,  True]])
    """

    reads: Reads = "pruned"

    def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Pattern) -> Choice:
        norms = gram.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt().to(weight.dtype)  # groups x columns
        rows_per_group = weight.shape[0] // gram.shape[0]
        score = weight.abs() * norms.repeat_interleave(rows_per_group, dim=0).view_as(weight)
        return Choice({name: pattern.best_mask_by_row(score)})
