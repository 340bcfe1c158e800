"""The convolution with cheap second derivatives against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from snows.graph.convolution import convolution, input_gradient, spread_arguments, weight_gradient
from tests.graphs import random

CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1d": ((2, 4, 7), (4, 4, 3), {"stride": [2], "padding": [1], "dilation": [2]}),
    "2d": ((2, 3, 4, 5), (2, 3, 3, 2), {"stride": [2, 1], "padding": [1, 0], "dilation": [1, 2]}),
    "2d, one number for both axes": ((2, 2, 5, 5), (2, 2, 2, 2), {"stride": [2], "padding": [1]}),
    "2d, defaults": ((2, 2, 4, 4), (3, 2, 2, 2), {}),
    "2d, rows left over by the stride": ((1, 2, 6, 6), (2, 2, 3, 3), {"stride": [2, 2]}),
    "grouped": ((2, 4, 4, 4), (6, 2, 3, 3), {"padding": [1, 1], "groups": 2}),
    "depthwise": ((2, 3, 4, 4), (3, 1, 3, 3), {"stride": [2, 2], "padding": [1, 1], "groups": 3}),
    "3d": ((1, 2, 3, 3, 4), (2, 2, 2, 1, 2), {"stride": [1, 1, 2], "padding": [1, 0, 1]}),
}


@pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # gradcheck, on inputs that do not vary
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_values_and_derivatives(case: str, bias: bool) -> None:
    shape, weight_shape, options = CONVOLUTIONS[case]
    x, weight = random(*shape), random(*weight_shape, seed=1)
    shift = random(weight_shape[0]) if bias else None
    reference = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(shape)]
    expected = reference(x, weight, shift, **options)
    torch.testing.assert_close(convolution(x, weight, shift, **options), expected)
    for varying in (x, weight):
        variable = varying.clone().requires_grad_()

        def ours(v: Tensor, varying: Tensor = varying) -> Tensor:
            return convolution(*((v, weight) if varying is x else (x, v)), shift, **options)

        torch.testing.assert_close(ours(variable), expected)
        assert torch.autograd.gradcheck(ours, variable)
        assert torch.autograd.gradgradcheck(ours, variable)


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_gradients_against_autograd(case: str) -> None:
    shape, weight_shape, options = CONVOLUTIONS[case]
    x, weight = random(*shape).requires_grad_(), random(*weight_shape, seed=1).requires_grad_()
    out = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(shape)](x, weight, **options)
    u = random(*out.shape, seed=2)
    expected = torch.autograd.grad(out, (x, weight), u)
    arguments = spread_arguments(weight, **options)
    torch.testing.assert_close(input_gradient(u, weight.detach(), x.shape[2:], *arguments), expected[0])
    torch.testing.assert_close(weight_gradient(u, x.detach(), weight.detach(), *arguments), expected[1])


def test_options_are_spread_over_the_spatial_dimensions() -> None:
    weight = torch.empty(4, 2, 3, 3)
    assert spread_arguments(weight) == ([1, 1], [0, 0], [1, 1], 1)
    assert spread_arguments(weight, [2], [1, 0], [3], 2) == ([2, 2], [1, 0], [3, 3], 2)
    assert spread_arguments(torch.empty(4, 2, 3), [2]) == ([2], [0], [1], 1)


@pytest.mark.parametrize("varies", ["input", "weight"])
def test_each_derivative_is_one_convolution(varies: str) -> None:
    """torch's own double backward computes the mixed term too."""
    x, weight = random(2, 3, 5, 5), random(4, 3, 3, 3)
    variable = (x if varies == "input" else weight).requires_grad_()
    with FlopCounterMode(display=False) as forward:
        out = convolution(x, weight)
    u = torch.zeros_like(out).requires_grad_()
    with FlopCounterMode(display=False) as backward:
        (gradient,) = torch.autograd.grad(out, variable, u, create_graph=True)
    with FlopCounterMode(display=False) as twice:
        torch.autograd.grad(gradient, u, torch.ones_like(gradient))
    one = 2 * (3 * 9) * (2 * 4 * 3 * 3)
    assert [counter.get_total_flops() for counter in (forward, backward, twice)] == [one, one, one]
