"""Several weights as one vector, and back."""

from __future__ import annotations

import pytest
import torch

from snows.solve.packing import Packing


def test_weights_lie_one_after_another() -> None:
    parts = [torch.arange(6.0).view(2, 3), torch.tensor([[7.0]]), torch.arange(8.0, 12.0).view(1, 2, 2)]
    packing = Packing(tuple(part.shape for part in parts))
    packed = packing.pack(parts)
    assert packed.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    for part, back in zip(parts, packing.unpack(packed), strict=True):
        assert torch.equal(part, back)


def test_a_single_weight_keeps_its_shape() -> None:
    weight = torch.randn(2, 3, 4).transpose(0, 1)
    packing = Packing((weight.shape,))
    assert packing.pack([weight]) is weight
    assert packing.unpack(weight) == [weight]


def test_a_vector_of_another_size_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="split"):
        Packing((torch.Size((2, 2)), torch.Size((1,)))).unpack(torch.zeros(6))
