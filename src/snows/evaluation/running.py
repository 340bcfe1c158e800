"""Running a caller's model on samples: in eval mode, without gradients, and restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..data.batches import Call
from ..devices.device import placed
from ..errors import InputError, a_type, first_line


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


def run(model: nn.Module, call: Call) -> Any:
    """What the model returns for these samples, on its own device. Floating-point samples take its dtype."""
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    args, kwargs = call.args, call.kwargs
    if first is not None:
        args, kwargs = placed((args, kwargs), first.device, first.dtype)
    try:
        return model(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in pytree.tree_leaves((args, kwargs)) if _is_tensor(leaf))
        raise InputError(
            f"{type(model).__name__} does not run on the test samples (shape {shapes}): {first_line(error)}"
        ) from error


def scores(model: nn.Module, call: Call | Tensor) -> Tensor:
    """The model's scores for these samples: its output, the output's `logits`, or its first entry."""
    return scores_of(run(model, call if isinstance(call, Call) else Call((call,), {}, None, len(call))))


def scores_of(output: Any) -> Tensor:
    """The scores in what a model returned."""
    tensor = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if tensor is None and isinstance(output, Mapping):
        tensor = next(iter(output.values()), None)
    if tensor is None and isinstance(output, list | tuple) and output:
        tensor = output[0]
    if not isinstance(tensor, Tensor):
        raise InputError(
            f"the model returns {a_type(output)}; class scores (samples x classes) are expected, "
            "or metric= (--metric of evaluate and prune) for other tasks"
        )
    return tensor


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)
