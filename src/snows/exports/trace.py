"""The network as a program of torch.export with a dynamic batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from ..graph.capture import has_samples, positional_names, quietly
from .base import Saved, blamed_on

_SAMPLES = 2  # one sample would freeze the batch dimension


def trace(saved: Saved, largest: int | None = None) -> ExportedProgram:
    """Trace the model; the first axis of every input is its batch, of one to `largest` samples."""
    args, kwargs = saved.inputs(_SAMPLES)
    dynamic = dynamic_shapes(saved, largest)
    with blamed_on(f"{saved.name} cannot be traced by torch.export"), quietly(), torch.no_grad():
        return torch.export.export(saved.model, args, kwargs, dynamic_shapes=dynamic, strict=False)


def dynamic_shapes(saved: Saved, largest: int | None = None) -> dict[str, Any]:
    """Which axes of the inputs are the batch, by the names of the model's arguments."""
    args, kwargs = saved.call
    batch = Dim("batch", min=1, max=largest)
    shapes = pytree.tree_map(lambda leaf: {0: batch} if has_samples(leaf) else None, (args, kwargs))
    return {**dict(zip(positional_names(saved.model, args), shapes[0], strict=True)), **shapes[1]}
