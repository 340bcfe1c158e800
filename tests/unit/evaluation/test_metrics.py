"""Metrics of the user: what they get, what they may return, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from snows import ArgumentError, InputError, evaluate

Pairs = Iterator[tuple[Any, Any]]
IMAGES = torch.randn(10, 3, 6, 8, generator=torch.Generator().manual_seed(0))


class Segments(nn.Module):
    """Scores of classes at each pixel, in a dictionary as torchvision's networks give them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 1)
        self.dropout = nn.Dropout()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.dropout(self.layer(x)), "aux": x}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Segments().train()


@pytest.fixture(scope="module")
def classes() -> Tensor:
    return torch.randint(4, (10, 6, 8), generator=torch.Generator().manual_seed(1))


def mean_iou(pairs: Pairs) -> Tensor:
    confusion = torch.zeros(4, 4)
    for outputs, labels in pairs:
        predicted = outputs["out"].argmax(1)
        confusion += torch.bincount((4 * labels + predicted).flatten(), minlength=16).view(4, 4)
    return (confusion.diag() / (confusion.sum(0) + confusion.sum(1) - confusion.diag())).mean()


def by_hand(model: nn.Module, classes: Tensor) -> float:
    with torch.no_grad():
        predicted = model.layer(IMAGES).argmax(1)
    ious = [((predicted == c) & (classes == c)).sum() / ((predicted == c) | (classes == c)).sum() for c in range(4)]
    return float(torch.stack(ious).mean())


def test_one_figure_of_all_batches(model: nn.Module, classes: Tensor) -> None:
    """An intersection over union is no mean over batches; and the mode, eval here, is put back."""
    forms: list[tuple[Any, Any]] = [
        (IMAGES, classes),
        (TensorDataset(IMAGES, classes), None),
        (DataLoader(TensorDataset(IMAGES, classes), batch_size=3), None),
        ([(IMAGES[:4], classes[:4]), (IMAGES[4:], classes[4:])], None),
        ({"x": IMAGES, "labels": classes}, None),
        ([({"x": IMAGES}, classes)], None),
        ([IMAGES[:1], IMAGES[1:]], classes),
    ]
    for data, labels in forms:
        found = evaluate(model, data, labels, batch=4, metric=mean_iou)
        assert found == {"mean_iou": pytest.approx(by_hand(model, classes), rel=1e-6)}
    assert model.training
    assert model.dropout.training


def test_batches_are_as_the_metric_needs_them(model: nn.Module, classes: Tensor) -> None:
    """Tables are cut to the batch size. Labels that are no table, such as the boxes of a detector, stay as they are."""

    def sizes(pairs: Pairs) -> dict[str, int]:
        found = [(len(outputs["out"]), len(labels), outputs["out"].requires_grad) for outputs, labels in pairs]
        return {str(index): count * 100 + labels for index, (count, labels, _) in enumerate(found)}

    assert evaluate(model, IMAGES, classes, batch=4, metric=sizes) == {"0": 404, "1": 404, "2": 202}
    boxes = [{"boxes": torch.zeros(index, 4)} for index in range(1, 11)]
    assert evaluate(model, [(IMAGES, boxes)], batch=4, metric=sizes) == {"0": 1010}
    assert evaluate(model, IMAGES, metric=lambda pairs: sum(labels is None for _, labels in pairs)) == {"<lambda>": 1}


class Counter:
    def __call__(self, pairs: Pairs) -> Any:
        return {"seen": torch.tensor([sum(1 for _ in pairs)])}


def test_names_of_figures(model: nn.Module) -> None:
    assert evaluate(model, IMAGES, batch=5, metric=Counter()) == {"seen": 2.0}
    assert evaluate(model, IMAGES, metric=len_of) == {"len_of": 1.0}


def len_of(pairs: Pairs) -> int:
    return len(list(pairs))


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("accuracy", "metric is a str; expected a function of pairs"),
        (lambda outputs, labels: 0, "metric <lambda> cannot be called with one argument"),
        (lambda pairs: "good", "metric <lambda> returned a str; expected a number or {name: number}"),
        (lambda pairs: torch.ones(2), r"metric <lambda> returned a Tensor of shape \(2,\)"),
        (lambda pairs: {"a": None}, "metric <lambda> returned a NoneType"),
    ],
)
def test_metrics_that_cannot_be_used(model: nn.Module, metric: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        evaluate(model, IMAGES, metric=metric)


def test_other_wrong_input(model: nn.Module, classes: Tensor) -> None:
    with pytest.raises(ArgumentError, match="metric and dense are both given"):
        evaluate(model, IMAGES, classes, dense=model, metric=mean_iou)
    with pytest.raises(InputError, match="Segments does not run on the test samples"):
        evaluate(model, IMAGES[:, :2], metric=len_of)
    with pytest.raises(ZeroDivisionError):  # the user's own
        evaluate(model, IMAGES, metric=lambda pairs: 1 / 0)
    assert model.training
