"""The linear probe against features taken by the model's own code and a regression solved another way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snows import InputError, linear_probe
from snows.evaluation.transfer import _predict
from tests.transformers import Vision, build, images


def labels_of(features: Tensor, classes: int = 3, seed: int = 3) -> Tensor:
    """Another task: classes that are linear in the features."""
    directions = torch.randn(features.shape[1], classes, generator=torch.Generator().manual_seed(seed))
    return ((features - features.mean(0)) @ directions).argmax(1)


def test_features_tell_a_task_that_is_linear_in_them() -> None:
    model, x = build(Vision), images(300)
    with torch.no_grad():
        y = labels_of(model.features(x))
    right = linear_probe(model, x[:200], y[:200], x[200:], y[200:])
    assert right > 0.85
    assert linear_probe(model, x[:200], y[:200], x[200:], y[200:], batch=7) == right
    assert linear_probe(model, x[:200], 10 * y[:200] + 2, x[200:], 10 * y[200:] + 2) == right  # whatever the numbers
    noise = torch.randint(0, 3, (300,), generator=torch.Generator().manual_seed(5))
    assert linear_probe(model, x[:200], noise[:200], x[200:], noise[200:]) < 0.5


def test_the_classifier_itself_plays_no_part() -> None:
    model, other, x = build(Vision), build(Vision), images(60)
    with torch.no_grad():
        y = labels_of(model.features(x))
        other.head.weight.mul_(-2)
    arguments = (x[:40], y[:40], x[40:], y[40:])
    assert linear_probe(other, *arguments) == linear_probe(model, *arguments)


def test_features_before_a_classifying_convolution_are_averaged() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        model = nn.Sequential(body, nn.Conv2d(8, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    x = images(200)
    with torch.no_grad():
        y = labels_of(body(x).mean((2, 3)), 2)
    assert linear_probe(model, x[:150], y[:150], x[150:], y[150:]) > 0.8


@pytest.mark.parametrize("ridge", [1e-3, 1.0])
def test_the_closed_form_is_the_minimum(ridge: float) -> None:
    """Against the normal equations with an intercept, solved as one system."""
    generator = torch.Generator().manual_seed(0)
    known, new = (torch.randn(n, 6, generator=generator, dtype=torch.float64) * 3 + 1 for n in (50, 40))
    targets = torch.randint(0, 4, (50,), generator=generator)
    center, spread = known.mean(0), known.std(0, correction=0)
    rows = torch.cat([(known - center) / spread, torch.ones(50, 1)], 1)
    penalty = torch.diag(torch.tensor([ridge] * 6 + [0.0], dtype=torch.float64))
    columns = nn.functional.one_hot(targets, 4).double()
    solution = torch.linalg.solve(rows.T @ rows / 50 + penalty, rows.T @ columns / 50)
    expected = (torch.cat([(new - center) / spread, torch.ones(40, 1)], 1) @ solution).argmax(1)
    (found,) = _predict(known, targets, 4, new, (ridge,))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("there are no train samples", lambda m, x, y: linear_probe(m, x[:0], y[:0], x, y)),
        (
            "the test labels are torch.int64 of shape (3,) for 4 samples",
            lambda m, x, y: linear_probe(m, x, y, x, y[:3]),
        ),
        ("the train labels are torch.float32", lambda m, x, y: linear_probe(m, x, y.float(), x, y)),
        ("Identity has no parameters", lambda m, x, y: linear_probe(nn.Identity().eval(), x, y, x, y)),
        ("LayerNorm has no layer whose input", lambda m, x, y: linear_probe(nn.LayerNorm(12).eval(), x, y, x, y)),
    ],
)
def test_wrong_input_gets_one_sentence(words: str, call: Any) -> None:
    with pytest.raises(InputError) as caught:
        call(build(Vision), images(4), torch.zeros(4, dtype=torch.long))
    assert str(caught.value).startswith(words)
