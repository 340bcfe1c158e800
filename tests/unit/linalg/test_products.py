"""Large products on a CPU: by oneDNN where that is possible, and the same to rounding."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from snows.linalg import products
from snows.linalg.products import multiplication_by


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def assert_close(found: Tensor, a: Tensor, b: Tensor) -> None:
    """Each entry within the rounding of its sum."""
    exact = a.double() @ b.double()
    most = 4 * torch.finfo(a.dtype).eps * (a.double().norm(dim=-1)[..., None] * b.double().norm(dim=-2)[..., None, :])
    assert found.dtype == a.dtype
    assert found.shape == exact.shape
    assert bool(((found.double() - exact).abs() <= most).all())


@pytest.mark.parametrize("batch", [(), (1,), (2,)])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 3), (300, 257, 270)])
@pytest.mark.parametrize("least", [1, 256])
def test_a_product_is_the_product(batch: tuple[int, ...], shape: tuple[int, int, int], least: int) -> None:
    rows, inner, columns = shape
    a, b = random(*batch, rows, inner), random(*batch, inner, columns)
    with mock.patch.object(products, "_LARGE", least):
        assert_close(multiplication_by(b)(a), a, b)
        views = a.mT.contiguous().mT, b.mT.contiguous().mT
        assert_close(multiplication_by(views[1], rows)(views[0]), a, b)


@pytest.mark.parametrize("shape", [(300, 300), (1, 300, 300)])
def test_large_products_are_left_to_onednn_unless_it_is_switched_off(shape: tuple[int, ...]) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    a, b = random(*shape), random(*shape)
    with mock.patch.object(products, "_packed", side_effect=products._packed) as packed:
        multiplication_by(b, 300)(a)
        assert packed.call_count == 2
        multiplication_by(b, 10)(a[..., :10, :])
        multiplication_by(b[..., :10])(a)
        multiplication_by(b.double())(a.double())
        multiplication_by(torch.cat([b, b]).view(2, 300, 300))(a)
        with mock.patch.object(torch.backends.mkldnn, "is_available", return_value=False):
            assert torch.equal(multiplication_by(b)(a), a @ b)
        assert packed.call_count == 2
