"""Large products on a CPU: by oneDNN where that is possible, and the same to rounding."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from snows.linalg import products
from snows.linalg.products import multiplication_by, product


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def assert_close(found: Tensor, a: Tensor, b: Tensor) -> None:
    """Each entry within the rounding of its sum."""
    exact = a.double() @ b.double()
    most = 4 * torch.finfo(a.dtype).eps * (a.double().norm(dim=1)[:, None] * b.double().norm(dim=0))
    assert bool(((found.double() - exact).abs() <= most).all())
    assert found.dtype == a.dtype
    assert found.is_contiguous()


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 3), (300, 257, 270)])
@pytest.mark.parametrize("least", [1, 256])
def test_a_product_is_the_product(shape: tuple[int, int, int], least: int) -> None:
    rows, inner, columns = shape
    a, b = random(rows, inner), random(inner, columns)
    with mock.patch.object(products, "_LARGE", least):
        assert_close(product(a, b), a, b)
        assert_close(product(a.T.contiguous().T, b.T.contiguous().T), a, b)  # views
        square = random(inner, inner)
        square = square + square.T
        assert_close(multiplication_by(square)(a), a, square)


def test_double_precision_stays() -> None:
    a, b = random(300, 300, dtype=torch.float64), random(300, 300, dtype=torch.float64)
    assert torch.equal(product(a, b), a @ b)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # said where flags are read
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_large_products_are_those_of_onednn_unless_it_is_switched_off() -> None:
    a, b = random(300, 300), random(300, 300)
    with mock.patch.object(products, "_linear", return_value=torch.zeros(1)) as used:
        assert product(a, b).shape == (1,)
        assert product(a[:10], b).shape == (10, 300)
        with torch.backends.mkldnn.flags(enabled=False):
            assert torch.equal(product(a, b), a @ b)
    assert used.call_count == 1
