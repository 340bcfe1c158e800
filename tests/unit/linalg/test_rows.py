"""Weights as rows, and least squares on kept columns against a dense solver."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from snows.devices.working_memory import working_within
from snows.linalg.rows import as_rows, from_rows, in_rows, inverse, least_squares
from tests.masks import LAYERS, best_fit, layer


def sweep_order(shape: tuple[int, ...]) -> list[int]:
    """Columns of the flattened weight by kernel position, then channel."""
    kernel = torch.Size(shape[2:]).numel()
    return [channel * kernel + place for place in range(kernel) for channel in range(shape[1])]


@pytest.mark.parametrize("name", LAYERS)
def test_columns_are_ordered_by_kernel_position_then_channel(name: str) -> None:
    weight, gram = layer(name)
    rows, ordered = as_rows(weight.float(), gram)
    columns = sweep_order(tuple(weight.shape))
    per_group = weight.shape[0] // len(gram)
    assert rows.shape == (len(gram), per_group, len(columns))
    assert rows.dtype == ordered.dtype == torch.float64
    for r, row in enumerate(weight.float().double().flatten(1)):
        assert rows[r // per_group, r % per_group].tolist() == row[columns].tolist()
    for group, own in enumerate(gram):
        assert ordered[group].tolist() == own[columns][:, columns].tolist()


@pytest.mark.parametrize("name", LAYERS)
def test_rows_become_the_weight_again(name: str) -> None:
    weight, gram = layer(name)
    weight = weight.float()
    rows, _ = as_rows(weight, gram)
    back = from_rows(rows, weight)
    assert back.dtype == torch.float32
    assert torch.equal(back, weight)
    mask = weight > 0
    assert torch.equal(from_rows(in_rows(mask, gram), weight), mask)


@pytest.mark.parametrize("shape", [(4, 2, 1), (4, 4, 3, 3), (4, 6)])
def test_weights_come_back_in_their_memory_layout(shape: tuple[int, ...]) -> None:
    """The captured graph views activations whose layout follows the weight's, even where a size of 1 leaves it open."""
    for weight in (torch.randn(shape), torch.randn(shape).transpose(0, 1).contiguous().transpose(0, 1)):
        rows, _ = as_rows(weight, torch.eye(weight[0].numel())[None])
        back = from_rows(rows, weight)
        assert torch.equal(back, weight)
        assert back.stride() == weight.stride()


def test_inverse() -> None:
    _, gram = layer("grouped")
    torch.testing.assert_close(inverse(gram), torch.linalg.inv(gram), rtol=1e-9, atol=1e-12)


def random_mask(rows: Tensor) -> Tensor:
    kept = torch.rand(rows.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    kept[0, 0] = False  # a row that keeps nothing
    kept[-1, -1] = True  # and one that keeps everything
    return kept


@pytest.mark.parametrize("most_bytes", [None, 1])
@pytest.mark.parametrize("name", LAYERS)
def test_least_squares_is_the_best_fit_of_every_row(name: str, most_bytes: int | None) -> None:
    rows, gram = as_rows(*layer(name))
    kept = random_mask(rows)
    with working_within(1 << 30 if most_bytes is None else most_bytes):
        solved = least_squares(rows, gram, kept)
    assert not solved[~kept].any()
    for group in range(rows.shape[0]):
        for row, mask, found in zip(rows[group], kept[group], solved[group], strict=True):
            expected = best_fit(row.numpy(), gram[group].numpy(), mask.numpy())
            torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(solved[-1, -1], rows[-1, -1])
