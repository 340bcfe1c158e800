"""Sparse kernels compute what the module does, and say what they cannot take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from snows.timing.kernels import SearchedTwoOfFour, csr, csr_refusal, kernels_of


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
    half, searched = kernels_of(torch.device("cuda"))
    assert "8 x 8; torch needs multiples of" in str(searched.refusal(nn.Conv2d(8, 8, 1).half()))
    assert "convolutions of 1x1" in str(searched.refusal(nn.Conv2d(8, 8, 3).half()))
    assert half.refusal(nn.Conv2d(64, 64, 1)) == "it is part of a Conv2d; torch has 2:4 kernels for nn.Linear only"
    assert "8 x 8; torch needs multiples of" in str(half.refusal(nn.Linear(8, 8).half()))
    assert kernels_of(torch.device("meta")) == ()


def two_of_four(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        weight = module.get_parameter("weight")
        keep = torch.tensor([1, 0, 0, 1]).repeat(weight.shape[1] // 4)
        weight *= keep.reshape(1, -1, *[1] * (weight.ndim - 2))
    return module.half()


TAKEN = [(nn.Linear(128, 64), (3, 7, 128)), (nn.Conv2d(64, 32, 1, bias=False), (3, 64, 5, 4))]


@pytest.mark.parametrize(("module", "shape"), TAKEN)
def test_the_searched_kernel_keeps_the_layout(
    module: nn.Module, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's GPU functions replaced by dense ones that check what they get."""

    def product(packed: Tensor, operand: Tensor, bias: Tensor | None, transpose_result: bool, alg_id: int) -> Tensor:
        assert operand.t().is_contiguous()  # no copy was needed
        assert operand.shape[1] % 16 == 0
        assert (transpose_result, alg_id) == (True, 7)
        return nn.functional.linear(operand.t(), packed, bias)

    searches: list[int] = []
    monkeypatch.setattr(torch, "_cslt_compress", lambda weight: weight.clone())
    monkeypatch.setattr(torch, "_cslt_sparse_mm", product)
    monkeypatch.setattr(torch, "_cslt_sparse_mm_search", lambda *a, **k: searches.append(1) or 7)
    module = two_of_four(thinned(module))
    packed, x = SearchedTwoOfFour(module), torch.randn(shape).half()
    if x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for _ in range(2):
            found, expected = packed(x), module(x)
            assert found.shape == expected.shape
            assert found.stride() == expected.stride()
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert len(searches) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("module", "shape"), TAKEN)
def test_packed_two_of_four_on_a_gpu(module: nn.Module, shape: tuple[int, ...]) -> None:
    layer, x = two_of_four(thinned(module)).cuda(), torch.randn(shape, device="cuda").half()
    with torch.no_grad():
        taken = [kernel for kernel in kernels_of(x.device) if kernel.refusal(layer) is None]
        assert taken
        for kernel in taken:
            torch.testing.assert_close(kernel.pack(layer)(x), layer(x), rtol=1e-2, atol=1e-2)
