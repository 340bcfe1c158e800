"""Which tensors are plain, and which can be stored in the type of another one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from snows.data.tensors import is_mask, misfit, peculiarity


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


PECULIAR = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "without values": lambda: torch.empty(3, device="meta"),
    "NestedTensor": nested,
    "bits8": lambda: torch.zeros(3, dtype=torch.uint8).view(torch.bits8),
    "expanded": lambda: torch.ones(1).expand(10**6, 10**6),
    "5000 dimensions": lambda: torch.ones([1] * 5000),
    "quint8": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
}


@pytest.mark.parametrize("words", PECULIAR)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on kinds that are in the making
def test_peculiar_tensors_are_named(words: str) -> None:
    assert words in str(peculiarity(PECULIAR[words]()))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint64, torch.bool, torch.complex64, torch.bfloat16])
def test_plain_tensors_have_no_peculiarity(dtype: torch.dtype) -> None:
    assert peculiarity(torch.zeros(3).to(dtype)) is None
    assert peculiarity(torch.nn.Parameter(torch.zeros(3))) is None


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (torch.tensor([True]), True),
        (torch.tensor([0.0, 1.0]), True),
        (torch.tensor([0, 1], dtype=torch.uint16), True),
        (torch.tensor([0.0, 1.0]).to(torch.float8_e5m2), True),
        (torch.tensor([0.5]), False),
        (torch.tensor([torch.nan]), False),
        (torch.tensor([1.0 + 0j]), False),
    ],
)
def test_masks_are_bools_or_zeros_and_ones(value: Tensor, answer: bool) -> None:
    assert is_mask(value) is answer


FLOAT, HALF, WHOLE = torch.zeros(1), torch.zeros(1).half(), torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("value", "target", "words"),
    [
        (torch.tensor([1.5]).double(), FLOAT, None),
        (torch.tensor([1.5]), HALF, None),
        (torch.tensor([torch.inf]), HALF, None),  # as it was
        (torch.tensor([1e6]), HALF, "do not fit into torch.float16"),
        (torch.tensor([1e300], dtype=torch.float64), FLOAT, "do not fit into torch.float32"),
        (torch.tensor([1 + 2j]), FLOAT, "complex numbers"),
        (torch.tensor([1.0]), torch.zeros(1, dtype=torch.complex64), "expected complex numbers"),
        (torch.tensor([1]), FLOAT, "whole numbers"),
        (torch.tensor([True]), FLOAT, "bools"),
        (torch.tensor([3.0]), WHOLE, None),
        (torch.tensor([3.5]), WHOLE, "do not fit into torch.int32"),
        (torch.tensor([2**40]), WHOLE, "do not fit into torch.int32"),
        (torch.tensor([1.0]).to(torch.float8_e4m3fn), FLOAT, None),
    ],
)
def test_numbers_are_not_changed_in_silence(value: Tensor, target: Tensor, words: str | None) -> None:
    found = misfit(value, target, mask=False)
    assert found is None if words is None else words in str(found)


def test_masks_may_be_stored_as_floats() -> None:
    assert misfit(torch.tensor([True]), FLOAT, mask=True) is None
    assert misfit(torch.tensor([1]), FLOAT, mask=True) is None
    assert "whole numbers" in str(misfit(torch.tensor([2]), FLOAT, mask=True))
