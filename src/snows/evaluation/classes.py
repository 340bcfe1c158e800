"""How good a network is: against labels, and against the dense network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.batches import Call, calls
from ..data.samples import check_count
from ..data.tensors import unusable
from ..data.usable import require_module
from ..errors import ArgumentError, InputError, a_type
from .language import language_figures, predicts_tokens, windows_of
from .metrics import Metric, measured
from .running import evaluating, scores

_BATCH = 250


def evaluate(
    model: nn.Module,
    data: Any,
    labels: Any = None,
    dense: nn.Module | Tensor | None = None,
    batch: int = _BATCH,
    *,
    metric: Metric | None = None,
) -> dict[str, float]:
    """Measure a network on samples: a classifier, a causal language model, or any network with your own metric.

    The model is left as it was.

    Args:
        model: A classifier (scores: samples x classes), a causal language model (samples x tokens x vocabulary), or,
            with `metric`, any module.
        data: The samples, in any form that `snows.prune` takes: a tensor, a `Dataset`, a `DataLoader` or batches, each
            a tensor, a tuple (inputs, labels) or a dict. For a language model: windows of tokens without padding.
        labels: Labels, one row for each sample. Default: those within the batches. A language model takes none.
        dense: The dense network to compare with, or a classifier's dense scores for `data`.
        batch: Samples to run at once.
        metric: Your own measure, for segmentation, detection, regression and so on. It gets an iterator of pairs
            (outputs, labels), one pair for each batch, as the model and the data give them, on the CPU. It returns a
            number or {name: number}.

    Returns:
        Fractions, not percentages. With labels: `top1`, `top5` and `loss` (cross-entropy). With `dense`: `agreement`
        (the share of samples with the same first choice) and `kl` (the mean divergence of the predictions from the
        dense ones). For a language model: `perplexity`; `agreement` and `kl` are then means over tokens. With `metric`:
        what it returns; a single number has the metric's name.

    Raises:
        ArgumentError: The metric cannot be used.
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
        >>> def squared_error(pairs):
        ...     return sum(float((outputs - labels).square().sum()) for outputs, labels in pairs)
        >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, model(x).detach()), batch_size=5)
        >>> snows.evaluate(model, loader, metric=squared_error)
        {'squared_error': 0.0}
    """
    require_module(model, "model")
    check_count("batch", batch)
    if not (dense is None or isinstance(dense, nn.Module) or (isinstance(dense, Tensor) and unusable(dense) is None)):
        raise ArgumentError(f"dense is {a_type(dense)}; expected an nn.Module, or a tensor of its scores")
    if isinstance(dense, nn.Module):
        require_module(dense, "dense network")
    if metric is not None:
        if dense is not None:
            raise ArgumentError("metric and dense are both given; expected one of them: a metric judges by itself")
        return measured(model, calls(data, model, labels, batch), metric)
    windows = windows_of(model, data, batch)
    if windows is not None:
        return _of_language_model(model, windows, labels, dense)
    return _of_classifier(model, data, labels, dense, batch)


def reference(dense: nn.Module, data: Any, batch: int = _BATCH) -> nn.Module | Tensor:
    """What `evaluate` compares several networks with: the dense network's class scores, computed once.

    The scores of a language model would fill the memory, and other data than a tensor may come in another order the
    next time. For those it is the model itself.
    """
    if not isinstance(data, Tensor) or predicts_tokens(dense, data):
        return dense
    return predict(dense, data, batch)


def predict(model: nn.Module, data: Any, batch: int = _BATCH) -> Tensor:
    """The network's class scores, in eval mode and without gradients. The mode is restored."""
    return _predictions([model], data, None, batch)[0][0]


def _predictions(models: Sequence[nn.Module], data: Any, labels: Any, batch: int) -> tuple[list[Tensor], list[Any]]:
    """The class scores of several networks for the same samples, and the labels of each batch."""
    found: list[list[Tensor]] = [[] for _ in models]
    given = []
    for call in calls(data, models[0], labels, batch):
        given.append(call.labels)
        for model, parts in zip(models, found, strict=True):
            with evaluating(model):
                parts.append(_class_scores(model, call).float().cpu())
    return [torch.cat(parts) for parts in found], given


def _of_classifier(
    model: nn.Module, data: Any, labels: Any, dense: nn.Module | Tensor | None, batch: int
) -> dict[str, float]:
    others = [dense] if isinstance(dense, nn.Module) and dense is not model else []
    (outputs, *expected), given = _predictions([model, *others], data, labels, batch)
    known = _joined(given)
    if known is None and dense is None:
        raise InputError("nothing to compare with: give labels, the dense network, or metric=")
    figures = {} if known is None else _against_labels(outputs, known)
    if dense is not None:
        figures |= _against_dense(outputs, dense if isinstance(dense, Tensor) else [outputs, *expected][-1])
    return figures


def _joined(given: list[Any]) -> Tensor | None:
    """The labels of all batches; None if none of them has any."""
    if all(labels is None for labels in given):
        return None
    for labels in given:
        if not isinstance(labels, Tensor):
            raise InputError(
                f"the labels of a batch are {a_type(labels)}; expected a tensor with one whole number per "
                "sample, or metric= (--metric of evaluate and prune) for other tasks"
            )
    return torch.cat([labels.cpu() for labels in given])


def _of_language_model(
    model: nn.Module, tokens: Tensor, labels: Any, dense: nn.Module | Tensor | None
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
        raise InputError(
            f"labels are {y.dtype} of shape {tuple(y.shape)}; expected one whole number per sample, "
            "or metric= (--metric of evaluate and prune) for other tasks"
        )
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
    if outputs.shape != expected.shape or not expected.is_floating_point():
        raise InputError(
            f"the dense scores are {expected.dtype} of shape {tuple(expected.shape)}; the network's are of shape "
            f"{tuple(outputs.shape)}"
        )
    expected = expected.to(outputs)
    log_q, log_p = outputs.log_softmax(1), expected.log_softmax(1)
    return {
        "agreement": float((outputs.argmax(1) == expected.argmax(1)).double().mean()),
        "kl": float(F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")),
    }


def _class_scores(model: nn.Module, call: Call) -> Tensor:
    outputs = scores(model, call)
    if outputs.ndim != 2:
        raise InputError(
            f"the model returns a tensor of shape {tuple(outputs.shape)}; class scores (samples x classes) are "
            "expected, or metric= (--metric of evaluate and prune) for other tasks"
        )
    return outputs
