"""What retraining minimizes, and what it is judged by on held-out samples: labels, or a dense network's predictions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.batches import Call
from ..errors import InputError
from ..evaluation.running import evaluating, scores

_OTHERWISE = "Other networks can be trained in a loop of your own, with masks frozen by snows.freeze"


class Objective(ABC):
    """`measure` is the figure of the held-out samples by which the best epoch is chosen."""

    measure: ClassVar[str]

    @abstractmethod
    def loss(self, outputs: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], labels: Any) -> Tensor:
        """The loss of one batch."""

    @abstractmethod
    def sums(self, outputs: Tensor, call: Call) -> dict[str, Tensor]:
        """Figures of one batch, added up over its predictions, and their number as `count`."""

    @abstractmethod
    def is_better(self, new: Mapping[str, float], old: Mapping[str, float]) -> bool:
        """Whether figures of held-out samples are better than others."""

    def check(self, labels: Any, count: int) -> None:
        """Refuse labels of training samples that cannot be used. `judge` comes first."""
        return

    def judge(self, model: nn.Module, held_out: Iterable[Call]) -> dict[str, float]:
        """Means over all predictions of the held-out samples, in eval mode."""
        totals: dict[str, Tensor] = {}
        with evaluating(model):
            for call in held_out:
                for name, value in self.sums(scores(model, call), call).items():
                    totals[name] = totals.get(name, 0) + value.cpu().double()  # not every device has float64
        count = totals.pop("count", None)
        if count is None:
            raise InputError("there are no held-out samples")
        return {name: float(total / count) for name, total in totals.items()}


class AgainstLabels(Objective):
    """Cross-entropy with one class for each sample."""

    measure = "top1"

    def __init__(self) -> None:
        self._classes = 0  # known when the first samples have been judged

    def loss(self, outputs: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], labels: Any) -> Tensor:
        return F.cross_entropy(outputs.float(), labels.long())

    def check(self, labels: Any, count: int) -> None:
        _check_labels(labels, count, self._classes)

    def sums(self, outputs: Tensor, call: Call) -> dict[str, Tensor]:
        if outputs.ndim != 2:
            raise InputError(
                f"the model returns a tensor of shape {tuple(outputs.shape)}; class scores (samples x classes) are "
                f"expected to train with labels; a teacher also takes the scores of tokens. {_OTHERWISE}"
            )
        self._classes = outputs.shape[1]
        self.check(call.labels, call.count)
        labels = call.labels.to(outputs.device, torch.long)
        losses = F.cross_entropy(outputs.float(), labels, reduction="none")
        hits = outputs.argmax(1) == labels
        return {"top1": hits.sum(), "loss": losses.sum(), "count": torch.tensor(len(labels))}

    def is_better(self, new: Mapping[str, float], old: Mapping[str, float]) -> bool:
        return (new["top1"], -new["loss"]) > (old["top1"], -old["loss"])


@dataclass(frozen=True)
class AgainstTeacher(Objective):
    """The divergence of the predictions from those of a dense network. Labels are not used."""

    teacher: nn.Module
    measure = "kl"

    def loss(self, outputs: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], labels: Any) -> Tensor:
        with torch.no_grad():
            expected = scores(self.teacher, Call(args, dict(kwargs), None, len(outputs)))
        return _divergences(outputs, expected).mean()

    def sums(self, outputs: Tensor, call: Call) -> dict[str, Tensor]:
        expected = scores(self.teacher, call)
        if outputs.shape != expected.shape or outputs.ndim not in (2, 3):
            raise InputError(
                f"the model returns {tuple(outputs.shape)} and the teacher {tuple(expected.shape)}; expected the same "
                f"scores of both, samples x classes or samples x tokens x vocabulary. {_OTHERWISE}"
            )
        divergences = _divergences(outputs, expected)
        same = outputs.argmax(-1) == expected.argmax(-1)
        return {"kl": divergences.sum(), "agreement": same.sum(), "count": torch.tensor(divergences.numel())}

    def is_better(self, new: Mapping[str, float], old: Mapping[str, float]) -> bool:
        return new["kl"] < old["kl"]


def _check_labels(labels: Any, count: int, classes: int) -> None:
    what = f"{labels.dtype} of shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else "none"
    if not isinstance(labels, Tensor) or labels.shape != (count,) or labels.is_floating_point():
        raise InputError(
            f"the labels of {count} samples are {what}; expected one whole number for each sample, or a teacher to "
            "train without labels"
        )
    low, high = (int(end) for end in labels.aminmax())
    if low < 0 or high >= classes:
        raise InputError(f"labels go from {low} to {high}; the network has {classes} outputs")


def _divergences(outputs: Tensor, expected: Tensor) -> Tensor:
    """KL divergence of each prediction from the expected one."""
    log_q, log_p = outputs.float().log_softmax(-1), expected.float().log_softmax(-1)
    return F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
