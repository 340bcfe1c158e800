"""Running a caller's model on samples: in eval mode, without gradients, and restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients. Afterwards every module is back in its own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def scores(model: nn.Module, x: Tensor) -> Tensor:
    """The model's scores for these samples, on its own device. Floating-point samples take its dtype."""
    first = next(model.parameters(), None)
    if first is not None:
        x = x.to(first.device, first.dtype if x.is_floating_point() else x.dtype)
    return _scores_in(_run(model, x))


def _run(model: nn.Module, x: Tensor) -> Any:
    try:
        return model(x)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise InputError(
            f"{type(model).__name__} does not run on the test samples (shape {tuple(x.shape)}): {line}"
        ) from error


def _scores_in(output: Any) -> Tensor:
    """The tensor of scores in a model's output: the output itself, its `logits`, or its first entry."""
    tensor = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if tensor is None and isinstance(output, Mapping):
        tensor = next(iter(output.values()), None)
    if tensor is None and isinstance(output, list | tuple) and output:
        tensor = output[0]
    if not isinstance(tensor, Tensor):
        raise InputError(f"the model returns a {type(output).__name__}; class scores (samples x classes) are expected")
    return tensor
