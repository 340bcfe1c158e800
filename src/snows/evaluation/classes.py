"""How good a network is: against labels, and against the dense network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from .language import language_figures, predicts_tokens
from .running import evaluating, scores

_BATCH = 250


def evaluate(
    model: nn.Module, x: Tensor, y: Tensor | None = None, dense: nn.Module | Tensor | None = None, batch: int = _BATCH
) -> dict[str, float]:
    """Figures of a classifier or language model on samples x, as fractions (not percentages).

    With labels y: top1, top5, loss. With the dense network (or, from `reference`, its scores for x): agreement (same
    first choice) and kl, the mean divergence of its predictions from the dense ones. A causal language model (x are
    tokens, samples x length) has no labels but a perplexity, and its agreement and kl are those of next tokens.
    """
    if y is not None and len(y) != len(x):
        raise InputError(f"there are {len(x)} samples and {len(y)} labels")
    if not len(x):
        raise InputError("there are no samples to evaluate on")
    if predicts_tokens(model, x):
        if y is not None:
            raise InputError("labels are given for a language model; leave them out: it is each next token that counts")
        if isinstance(dense, Tensor):
            raise InputError("scores are given to compare a language model with; give the dense model itself")
        return language_figures(model, x, dense)
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
        expected = dense if isinstance(dense, Tensor) else outputs if dense is model else predict(dense, x, batch)
        figures["agreement"] = float((outputs.argmax(1) == expected.argmax(1)).double().mean())
        log_p, log_q = expected.log_softmax(1), outputs.log_softmax(1)
        figures["kl"] = float(F.kl_div(log_q, log_p, log_target=True, reduction="batchmean"))
    return figures


def reference(dense: nn.Module, x: Tensor, batch: int = _BATCH) -> nn.Module | Tensor:
    """What several networks are compared with by `evaluate`: the dense one's class scores, computed once.

    A language model's would fill the memory: there it is the model itself.
    """
    return dense if predicts_tokens(dense, x) else predict(dense, x, batch)


def predict(model: nn.Module, x: Tensor, batch: int = _BATCH) -> Tensor:
    """The network's class scores, in eval mode and without gradients; the mode is put back."""
    with evaluating(model):
        return torch.cat([_class_scores(model, part).float().cpu() for part in x.split(batch)])


def _class_scores(model: nn.Module, x: Tensor) -> Tensor:
    found = scores(model, x)
    if found.ndim != 2:
        raise InputError(
            f"the model returns a tensor of shape {tuple(found.shape)}; class scores (samples x classes) are expected"
        )
    return found
