"""Convolution with cheap second derivatives.

In a segment, either the input of a convolution varies or its weight does, never both. torch's own double backward does
not know this: it also computes the mixed term, a convolution as large as the useful one. Here each derivative is one
convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Sizes = list[int]
Arguments = tuple[Sizes, Sizes, Sizes, int]


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes | None = None,
    padding: Sizes | None = None,
    dilation: Sizes | None = None,
    groups: int = 1,
) -> Tensor:
    """aten.conv1d, conv2d and conv3d, with their arguments."""
    arguments = spread_arguments(weight, stride, padding, dilation, groups)
    out: Tensor
    if weight.requires_grad:
        out = _VaryingWeight.apply(x, weight, *arguments)  # type: ignore[no-untyped-call]
    elif x.requires_grad:
        out = _VaryingInput.apply(x, weight, *arguments)  # type: ignore[no-untyped-call]
    else:
        return convolve(x, weight, *arguments, bias)
    return out if bias is None else out + bias.view(-1, *[1] * (weight.ndim - 2))


def spread_arguments(
    weight: Tensor,
    stride: Sizes | None = None,
    padding: Sizes | None = None,
    dilation: Sizes | None = None,
    groups: int = 1,
) -> Arguments:
    """Stride, padding and dilation with one number for each spatial dimension, and the number of groups."""
    n = weight.ndim - 2
    return _spread(stride, n, 1), _spread(padding, n, 0), _spread(dilation, n, 1), groups


def _spread(value: Sizes | None, n: int, default: int) -> Sizes:
    value = list(value) if value is not None else [default]
    return value * n if len(value) == 1 else value


def convolve(
    x: Tensor, weight: Tensor, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int, bias: Tensor | None = None
) -> Tensor:
    zeros = [0] * len(stride)
    out: Tensor = torch.ops.aten.convolution(x, weight, bias, stride, padding, dilation, False, zeros, groups)
    return out


def input_gradient(
    gradient: Tensor, weight: Tensor, size: Sequence[int], stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Tensor:
    """The gradient with respect to an input of this spatial size: a transposed convolution of the output's gradient."""
    kernel, small = weight.shape[2:], gradient.shape[2:]
    output_padding = [
        full - ((out - 1) * s - 2 * p + d * (k - 1) + 1)
        for full, out, s, p, d, k in zip(size, small, stride, padding, dilation, kernel, strict=True)
    ]
    back: Tensor = torch.ops.aten.convolution(
        gradient, weight, None, stride, padding, dilation, True, output_padding, groups
    )
    return back


def weight_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Tensor:
    """The gradient with respect to the weight: the input correlated with the output's gradient.

    Only the shape of `weight` is read.
    """
    zeros = [0] * len(stride)
    back: Tensor = torch.ops.aten.convolution_backward(
        gradient, x, weight, None, stride, padding, dilation, False, zeros, groups, [False, True, False]
    )[1]
    return back


class _VaryingInput(torch.autograd.Function):
    """Linear in x. Its backward is a transposed convolution of the gradient, which is linear in the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.size, ctx.arguments = x.shape[2:], (stride, padding, dilation, groups)
        return convolve(x, weight, stride, padding, dilation, groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return input_gradient(gradient, weight, ctx.size, *ctx.arguments), None, None, None, None, None


class _VaryingWeight(torch.autograd.Function):
    """Linear in the weight. Its backward correlates the input with the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.arguments = (stride, padding, dilation, groups)
        return convolve(x, weight, stride, padding, dilation, groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        back = _WeightGradient.apply(gradient, x, weight.detach(), *ctx.arguments)  # type: ignore[no-untyped-call]
        return None, back, None, None, None, None


class _WeightGradient(torch.autograd.Function):
    """The gradient with respect to the weight. Linear in the gradient with respect to the output."""

    @staticmethod
    def forward(
        ctx: Any,
        gradient: Tensor,
        x: Tensor,
        weight: Tensor,
        stride: Sizes,
        padding: Sizes,
        dilation: Sizes,
        groups: int,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.arguments = (stride, padding, dilation, groups)
        return weight_gradient(gradient, x, weight, stride, padding, dilation, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, direction: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return convolve(x, direction, *ctx.arguments), None, None, None, None, None, None
