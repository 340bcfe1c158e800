"""Sparse kernels compute what the module does, and say what they cannot take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from snows.timing.kernels import csr, csr_refusal, kernels_of


def thinned(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        weight = module.get_parameter("weight")
        weight *= torch.rand(weight.shape, generator=generator) > 0.7
    return module


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("module", "x"),
    [
        (lambda bias: nn.Linear(12, 7, bias=bias), torch.randn(3, 5, 12)),
        (lambda bias: nn.Linear(12, 7, bias=bias), torch.randn(1, 12)),
        (lambda bias: nn.Conv2d(6, 9, 1, bias=bias), torch.randn(3, 6, 4, 5)),
    ],
)
def test_sparse_rows_compute_the_same(module, x: Tensor, bias: bool) -> None:  # type: ignore[no-untyped-def]
    made = thinned(module(bias))
    with torch.no_grad():
        expected, found = made(x), csr(made)(x)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Conv2d(4, 4, 3), "convolutions of 1x1"),
        (nn.Conv2d(4, 4, 1, groups=4), "without groups"),
        (nn.Conv2d(4, 4, 1, stride=2), "with stride or padding"),
        (nn.Conv1d(4, 4, 1), "linear layers and convolutions of 1x1"),
    ],
)
def test_what_sparse_rows_cannot_take(module: nn.Module, words: str) -> None:
    assert words in str(csr_refusal(module))


def test_each_device_has_its_kernels() -> None:
    assert [kernel.name for kernel in kernels_of(torch.device("cpu"))] == ["CSR, MKL"]
    (half,) = kernels_of(torch.device("cuda"))
    assert half.refusal(nn.Conv2d(64, 64, 1)) == "it is part of a Conv2d; torch has 2:4 kernels for nn.Linear only"
    assert "8 x 8; torch needs multiples of" in str(half.refusal(nn.Linear(8, 8).half()))
    assert kernels_of(torch.device("meta")) == ()
