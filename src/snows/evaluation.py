"""How good a network is: against labels, and against the dense network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import InputError

_BATCH = 250


def evaluate(
    model: nn.Module, x: Tensor, y: Tensor | None = None, dense: nn.Module | None = None, batch: int = _BATCH
) -> dict[str, float]:
    """Figures of a classifier on samples x, as fractions (not percentages).

    With labels y: top1, top5, loss. With the dense network: agreement (same first choice) and kl, the mean
    divergence of its predictions from the dense ones.
    """
    if y is not None and len(y) != len(x):
        raise InputError(f"there are {len(x)} samples and {len(y)} labels")
    if not len(x):
        raise InputError("there are no samples to evaluate on")
    if y is None and dense is None:
        raise InputError("nothing to compare with: give labels, or the dense network")
    outputs = predict(model, x, batch)
    figures: dict[str, float] = {}
    if y is not None:
        if y.ndim != 1 or y.is_floating_point():
            raise InputError(f"labels are {y.dtype} of shape {tuple(y.shape)}; expected one whole number per sample")
        y = y.to(outputs.device, torch.long)
        if int(y.max()) >= outputs.shape[1] or int(y.min()) < 0:
            raise InputError(
                f"labels go from {int(y.min())} to {int(y.max())}; the network has {outputs.shape[1]} outputs"
            )
        best = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
        hits = best == y[:, None]
        figures["top1"] = float(hits[:, 0].double().mean())
        figures["top5"] = float(hits.any(1).double().mean())
        figures["loss"] = float(F.cross_entropy(outputs, y))
    if dense is not None:
        reference = predict(dense, x, batch)
        figures["agreement"] = float((outputs.argmax(1) == reference.argmax(1)).double().mean())
        log_p, log_q = reference.log_softmax(1), outputs.log_softmax(1)
        figures["kl"] = float(F.kl_div(log_q, log_p, log_target=True, reduction="batchmean"))
    return figures


def predict(model: nn.Module, x: Tensor, batch: int = _BATCH) -> Tensor:
    """The network's logits, in eval mode and without gradients; the mode is put back."""
    first = next(model.parameters(), None)
    device = first.device if first is not None else x.device
    dtype = first.dtype if first is not None and x.is_floating_point() else x.dtype
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            return torch.cat([logits(_run(model, part.to(device, dtype))).float().cpu() for part in x.split(batch)])
    finally:
        for module, training in modes:
            module.training = training


def _run(model: nn.Module, x: Tensor) -> Any:
    try:
        return model(x)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise InputError(
            f"{type(model).__name__} does not run on the test samples (shape {tuple(x.shape)}): {line}"
        ) from error


def logits(output: Any) -> Tensor:
    """The tensor that holds class scores: the output itself, its `logits`, or its first entry."""
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if found is None and isinstance(output, Mapping):
        found = next(iter(output.values()), None)
    if found is None and isinstance(output, list | tuple) and output:
        found = output[0]
    if not isinstance(found, Tensor) or found.ndim != 2:
        what = f"tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(output).__name__
        raise InputError(f"the model returns a {what}; class scores (samples x classes) are expected")
    return found
