"""Running a caller's model on samples: in eval mode, without gradients, and put back as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def scores(model: nn.Module, x: Tensor) -> Tensor:
    """What the model gives for these samples, where the model is and in its own dtype (whole numbers stay)."""
    first = next(model.parameters(), None)
    if first is not None:
        x = x.to(first.device, first.dtype if x.is_floating_point() else x.dtype)
    return _tensor_of(_run(model, x))


def _run(model: nn.Module, x: Tensor) -> Any:
    try:
        return model(x)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise InputError(
            f"{type(model).__name__} does not run on the test samples (shape {tuple(x.shape)}): {line}"
        ) from error


def _tensor_of(output: Any) -> Tensor:
    """The tensor that holds scores: the output itself, its `logits`, or its first entry."""
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if found is None and isinstance(output, Mapping):
        found = next(iter(output.values()), None)
    if found is None and isinstance(output, list | tuple) and output:
        found = output[0]
    if not isinstance(found, Tensor):
        raise InputError(f"the model returns a {type(output).__name__}; class scores (samples x classes) are expected")
    return found
