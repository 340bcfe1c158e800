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
    """Measure a classifier or a causal language model on samples. The model is left as it was.

    Args:
        model: A classifier (scores: samples x classes) or a causal language model (samples x tokens x vocabulary).
        x: The samples. For a language model: windows of tokens, samples x length.
        y: Labels of a classifier's samples, one whole number each. A language model takes none.
        dense: The dense network to compare with, or a classifier's dense scores for `x`.
        batch: Samples to run at once.

    Returns:
        Fractions, not percentages. With `y`: `top1`, `top5` and `loss` (cross-entropy). With `dense`: `agreement` (the
        share of samples with the same first choice) and `kl` (the mean divergence of the predictions from the dense
        ones). For a language model: `perplexity`; `agreement` and `kl` are then means over tokens.

    Raises:
        InputError: The samples, the labels and the model do not fit together, or there is nothing to compare with.

    Example:
        >>> import snows, torch
        >>> model = torch.nn.Linear(4, 3)
        >>> x = torch.randn(10, 4)
        >>> labels = model(x).argmax(1)
        >>> figures = snows.evaluate(model, x, labels, dense=model)
        >>> sorted(figures)
        ['agreement', 'kl', 'loss', 'top1', 'top5']
        >>> figures["top1"], figures["agreement"]
        (1.0, 1.0)
    """
    if y is not None and len(y) != len(x):
        raise InputError(f"there are {len(x)} samples and {len(y)} labels")
    if not len(x):
        raise InputError("there are no samples to evaluate on")
    if predicts_tokens(model, x):
        return _of_language_model(model, x, y, dense)
    if y is None and dense is None:
        raise InputError("nothing to compare with: give labels, or the dense network")
    outputs = predict(model, x, batch)
    figures = {} if y is None else _against_labels(outputs, y)
    if dense is not None:
        expected = dense if isinstance(dense, Tensor) else outputs if dense is model else predict(dense, x, batch)
        figures |= _against_dense(outputs, expected)
    return figures


def reference(dense: nn.Module, x: Tensor, batch: int = _BATCH) -> nn.Module | Tensor:
    """What `evaluate` compares several networks with: the dense network's class scores, computed once.

    The scores of a language model would fill the memory. For those it is the model itself.
    """
    return dense if predicts_tokens(dense, x) else predict(dense, x, batch)


def predict(model: nn.Module, x: Tensor, batch: int = _BATCH) -> Tensor:
    """The network's class scores, in eval mode and without gradients. The mode is restored."""
    with evaluating(model):
        return torch.cat([_class_scores(model, part).float().cpu() for part in x.split(batch)])


def _of_language_model(
    model: nn.Module, tokens: Tensor, labels: Tensor | None, dense: nn.Module | Tensor | None
) -> dict[str, float]:
    if labels is not None:
        raise InputError(
            "labels are given for a language model; leave them out: the samples' own next tokens are the labels"
        )
    if isinstance(dense, Tensor):
        raise InputError("dense is a tensor of scores; expected the dense language model itself")
    return language_figures(model, tokens, dense)


def _against_labels(outputs: Tensor, y: Tensor) -> dict[str, float]:
    if y.ndim != 1 or y.is_floating_point():
        raise InputError(f"labels are {y.dtype} of shape {tuple(y.shape)}; expected one whole number per sample")
    y, classes = y.to(outputs.device, torch.long), outputs.shape[1]
    if int(y.max()) >= classes or int(y.min()) < 0:
        raise InputError(f"labels go from {int(y.min())} to {int(y.max())}; the network has {classes} outputs")
    hits = outputs.topk(min(5, classes), dim=1).indices == y[:, None]  # samples x 5
    return {
        "top1": float(hits[:, 0].double().mean()),
        "top5": float(hits.any(1).double().mean()),
        "loss": float(F.cross_entropy(outputs, y)),
    }


def _against_dense(outputs: Tensor, expected: Tensor) -> dict[str, float]:
    log_q, log_p = outputs.log_softmax(1), expected.log_softmax(1)
    return {
        "agreement": float((outputs.argmax(1) == expected.argmax(1)).double().mean()),
        "kl": float(F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")),
    }


def _class_scores(model: nn.Module, x: Tensor) -> Tensor:
    outputs = scores(model, x)
    if outputs.ndim != 2:
        raise InputError(
            f"the model returns a tensor of shape {tuple(outputs.shape)}; class scores (samples x classes) are expected"
        )
    return outputs
