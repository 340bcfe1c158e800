"""Linear maps by autograd against dense Jacobians."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from snows.graph.autodiff import differentiate, linearize
from tests.graphs import random

POINT = random(5)


def outputs(x: Tensor) -> tuple[Tensor, ...]:
    """Two that vary, with one between them that does not."""
    return x.sin() * x.sum(), torch.ones(3, dtype=x.dtype), (x**3)[:2]


def jacobian(index: int) -> Tensor:
    found: Tensor = torch.autograd.functional.jacobian(lambda x: outputs(x)[index], POINT)
    return found


def test_a_linear_map_is_the_jacobian() -> None:
    values, linear = linearize(outputs, POINT)
    for value, expected in zip(values, outputs(POINT), strict=True):
        torch.testing.assert_close(value, expected)
        assert not value.requires_grad
    v = random(5, seed=1)
    pushed = linear.push(v)
    for index in range(3):
        torch.testing.assert_close(pushed[index], jacobian(index) @ v)
    u = [random(*value.shape, seed=2) for value in values]
    factors = [0.5, 7.0, -2.0]
    expected = sum(factor * jacobian(i).T @ part for i, (factor, part) in enumerate(zip(factors, u, strict=True)))
    torch.testing.assert_close(linear.pull(u, factors), expected)
    torch.testing.assert_close(linear.pull(u, factors), expected)  # as often as wanted
    torch.testing.assert_close(linear.push(2 * v)[0], 2 * pushed[0])


def test_the_function_runs_once() -> None:
    calls: list[Tensor] = []

    def watched(x: Tensor) -> tuple[Tensor, ...]:
        calls.append(x)
        return outputs(x)

    _, linear = linearize(watched, POINT)
    for _ in range(2):
        linear.push(POINT)
        linear.pull(list(outputs(POINT)), [1.0, 1.0, 1.0])
    assert len(calls) == 1


def test_a_push_is_one_pass_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _, linear = linearize(outputs, POINT)
    passes: list[object] = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **kwargs: passes.append(args) or grad(*args, **kwargs))
    counts = []
    for _ in range(3):
        linear.push(POINT)
        counts.append(len(passes))
    assert counts == [2, 3, 4]


def test_several_variables() -> None:
    x, y = random(3), random(3, seed=1)
    (value,), push, pull = differentiate(lambda a, b: (a * b,), (x, y))
    torch.testing.assert_close(value, x * y)
    v, w, u = random(3, seed=2), random(3, seed=3), random(3, seed=4)
    torch.testing.assert_close(push([v, w])[0], v * y + x * w)
    torch.testing.assert_close(list(pull([u])), [u * y, u * x])


def test_a_variable_that_nothing_reads() -> None:
    _, push, pull = differentiate(lambda a, b: (2 * a,), (POINT, POINT))
    torch.testing.assert_close(push([POINT, POINT])[0], 2 * POINT)
    torch.testing.assert_close(list(pull([POINT])), [2 * POINT, torch.zeros_like(POINT)])


def test_nothing_varies() -> None:
    (value,), push, pull = differentiate(lambda x: (torch.ones(2),), (POINT,))
    assert value.tolist() == [1, 1]
    assert push([POINT])[0].tolist() == [0, 0]
    assert pull([value])[0].tolist() == [0] * 5


def test_the_point_is_left_alone() -> None:
    point = POINT.clone()
    linearize(outputs, point)
    assert not point.requires_grad
    assert point.grad is None
