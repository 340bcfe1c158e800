"""Figures against values computed by hand."""

from __future__ import annotations

import math
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from snows.errors import InputError
from snows.evaluation.classes import evaluate, predict, reference


class Returns(nn.Module):
    """What is computed from the input; the input itself by default."""

    def __init__(self, function: Any = lambda x: x) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


# Probabilities of seven classes, in thirty-seconds; their logarithms are inputs and scores alike.
SHARES = torch.tensor(
    [
        [16, 8, 4, 1, 1, 1, 1],
        [1, 1, 4, 8, 16, 1, 1],
        [8, 16, 4, 2, 1, 0.75, 0.25],
        [2, 4, 8, 16, 1, 0.75, 0.25],
    ]
)
X = (SHARES / 32).log()
Y = torch.tensor([0, 3, 1, 6])  # right; second of seven; right; last of seven


def test_figures_against_labels() -> None:
    figures = evaluate(Returns(), X, Y)
    assert set(figures) == {"top1", "top5", "loss"}
    assert figures["top1"] == 2 / 4
    assert figures["top5"] == 3 / 4
    expected = -(math.log(16 / 32) + math.log(8 / 32) + math.log(16 / 32) + math.log(0.25 / 32)) / 4
    assert figures["loss"] == pytest.approx(expected, rel=1e-6)


def test_figures_against_the_dense_network() -> None:
    """KL from dense to pruned, sum p log(p / q): here the pruned network swaps the first two classes."""
    swapped = Returns(lambda x: x[:, [1, 0, 2, 3, 4, 5, 6]])
    figures = evaluate(swapped, X, dense=Returns())
    assert set(figures) == {"agreement", "kl"}
    assert figures["agreement"] == 2 / 4
    kl = [(16 - 8) * math.log(16 / 8) / 32, 0, (16 - 8) * math.log(16 / 8) / 32, (4 - 2) * math.log(4 / 2) / 32]
    assert figures["kl"] == pytest.approx(sum(kl) / 4, rel=1e-5)
    same = evaluate(Returns(), X, dense=Returns())
    assert same == {"agreement": 1.0, "kl": pytest.approx(0, abs=1e-7)}


def test_the_divergence_is_from_the_dense_predictions() -> None:
    """It is not symmetric: p log(p / q) with p dense."""
    p, q = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])
    figures = evaluate(Returns(lambda x: q.log()), p.log(), dense=Returns())
    assert figures["kl"] == pytest.approx(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5), rel=1e-5)


@pytest.mark.parametrize("batch", [1, 3, 4, 100])
def test_the_batch_size_does_not_matter(batch: int) -> None:
    assert evaluate(Returns(), X, Y, Returns(), batch=batch) == pytest.approx(evaluate(Returns(), X, Y, Returns()))


def test_fewer_than_five_classes() -> None:
    figures = evaluate(Returns(), X[:, :3], torch.tensor([0, 2, 1, 2]))
    assert figures["top1"] == 1
    assert figures["top5"] == 1


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: (x, x.mean()),
        lambda x: [x],
        lambda x: {"logits": x, "features": -x},
        lambda x: {"out": x, "aux": -x},
        lambda x: OrderedDict(scores=x, features=-x),
        lambda x: SimpleNamespace(hidden=-x, logits=x),
    ],
)
def test_scores_are_found_in_tuples_dicts_and_objects(wrap: Any) -> None:
    assert evaluate(Returns(wrap), X, Y) == evaluate(Returns(), X, Y)


def test_models_in_half_precision_and_integer_inputs() -> None:
    model = nn.Linear(7, 3).to(torch.bfloat16)
    assert predict(model, X).dtype == torch.float32
    tokens = torch.tensor([[0, 1], [1, 2]])
    embedding = nn.Sequential(nn.Embedding(3, 2), nn.Flatten())
    assert predict(embedding, tokens).shape == (2, 4)


@pytest.mark.parametrize(
    "data",
    [
        TensorDataset(X, Y),
        DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True),
        [(X[:1], Y[:1]), (X[1:], Y[1:])],
        {"x": X, "labels": Y},
    ],
)
def test_whatever_prune_takes(data: Any) -> None:
    """Labels are those of the batches; a shuffled loader compares with the dense network sample by sample."""
    swapped = Returns(lambda x: x[:, [1, 0, 2, 3, 4, 5, 6]])
    assert evaluate(swapped, data, dense=Returns()) == pytest.approx(evaluate(swapped, X, Y, Returns()))
    assert evaluate(swapped, data, dense=swapped)["kl"] == 0
    expected = reference(Returns(), data)
    assert isinstance(expected, nn.Module)
    assert evaluate(swapped, data, dense=expected)["agreement"] == 2 / 4


def test_labels_of_batches_that_are_no_classes() -> None:
    with pytest.raises(InputError, match=r"the labels of a batch are a list; expected a tensor .* or metric="):
        evaluate(Returns(), [(X, [{"boxes": Y}] * 4)])
    with pytest.raises(InputError, match="there are 4 samples or more and 3 labels"):
        evaluate(Returns(), TensorDataset(X, Y), Y[:3])


class Broken(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        raise RuntimeError("shapes do not fit\nand more")


@pytest.mark.parametrize("last", [nn.Linear(7, 7), Broken(7, 7)])
def test_the_mode_of_every_module_is_put_back(last: nn.Module) -> None:
    model = nn.Sequential(nn.BatchNorm1d(7), nn.Dropout(), last).train()
    model[0].eval()  # as in fine-tuning with frozen statistics
    before = {name: module.training for name, module in model.named_modules()}
    counter = model[0].running_mean.clone()
    if isinstance(last, Broken):
        with pytest.raises(InputError, match=r"^Sequential does not run on the test samples \(shape \(4, 7\)\)"):
            predict(model, X)
    else:
        assert torch.equal(predict(model, X), predict(model, X))  # no dropout
        assert not predict(model, X).requires_grad
    assert {name: module.training for name, module in model.named_modules()} == before
    assert torch.equal(model[0].running_mean, counter)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("there are 4 samples or more and 3 labels", lambda: evaluate(Returns(), X, Y[:3])),
        ("there are no samples to evaluate on", lambda: evaluate(Returns(), X[:0], Y[:0])),
        ("nothing to compare with: give labels, the dense network, or metric=", lambda: evaluate(Returns(), X)),
        ("labels go from 0 to 7; the network has 7 outputs", lambda: evaluate(Returns(), X, Y.clamp(0, 6) + Y // 6)),
        ("labels go from -1 to 6; the network has 7 outputs", lambda: evaluate(Returns(), X, Y - (Y == 0).long())),
        ("labels are torch.float32 of shape (4,); expected", lambda: evaluate(Returns(), X, Y.float())),
        ("labels are torch.int64 of shape (4, 1); expected", lambda: evaluate(Returns(), X, Y[:, None])),
        ("the model returns a tensor of shape (4,); class scores", lambda: evaluate(Returns(lambda x: x[:, 0]), X, Y)),
        ("the model returns a tensor of shape (4, 7, 1)", lambda: evaluate(Returns(lambda x: x[..., None]), X, Y)),
        ("the model returns a str; class scores", lambda: evaluate(Returns(lambda x: "cat"), X, Y)),
        ("the model returns a tuple; class scores", lambda: evaluate(Returns(lambda x: ()), X, Y)),
        ("Linear does not run on the test samples (shape (4, 7)): ", lambda: evaluate(nn.Linear(5, 2), X, Y)),
    ],
)
def test_wrong_input_gets_one_sentence(words: str, call: Any) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
