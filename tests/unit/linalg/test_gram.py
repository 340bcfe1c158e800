"""Gram matrices: blocks of kept columns by indexing, inverses by a dense solver, and the least damping that helps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from snows.errors import InputError
from snows.linalg import gram as room
from snows.linalg.gram import damped, inverse_root, inverted, kept_blocks


def positive_definite(count: int, size: int, seed: int = 0) -> Tensor:
    x = torch.randn(count, 3 * size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.mT @ x / (3 * size)


def rows_with(counts: list[int], columns: int) -> Tensor:
    """A mask whose rows keep so many random columns."""
    generator = torch.Generator().manual_seed(1)
    kept = torch.zeros(len(counts), columns, dtype=torch.bool)
    for row, count in zip(kept, counts, strict=True):
        row[torch.randperm(columns, generator=generator)[:count]] = True
    return kept


COUNTS = [3, 0, 7, 3, 5, 1]


@pytest.mark.parametrize(("most_bytes", "chunks"), [(None, 1), (2 * 7 * 7 * 8, 3), (7 * 7 * 8, 6), (1, 6)])
def test_blocks_are_the_kept_columns_of_every_row(most_bytes: int | None, chunks: int) -> None:
    gram, kept = positive_definite(2, 7), rows_with(COUNTS, 7)
    seen: list[int] = []
    blocks = list(kept_blocks(gram, kept, most_bytes))
    assert len(blocks) == chunks
    for block in blocks:
        count, width = block.columns.shape
        assert most_bytes is None or count == 1 or count * width**2 * 8 <= most_bytes
        for row, columns, real, own in zip(block.rows.tolist(), block.columns, block.real, block.gram, strict=True):
            seen.append(row)
            chosen = columns[real]
            assert chosen.tolist() == kept[row].nonzero().flatten().tolist()
            assert torch.equal(own[real][:, real], gram[row // 3][chosen][:, chosen])
            padded = ~real
            assert not own[real][:, padded].any()
            assert torch.equal(
                own[padded][:, padded],
                float(gram.diagonal(dim1=1, dim2=2).mean()) * torch.eye(int(padded.sum())).double(),
            )
        assert width == max(1, *(COUNTS[row] for row in block.rows.tolist()))
    assert sorted(seen) == list(range(6))
    assert [COUNTS[row] for row in seen] == sorted(COUNTS)  # narrow ones together, of all groups


def test_blocks_of_dead_inputs_stay_invertible() -> None:
    (block,) = kept_blocks(torch.zeros(1, 3, 3, dtype=torch.float64), rows_with([1, 2], 3))
    assert block.gram[0].diagonal().tolist() == [0.0, 1.0]  # padding is not zero, whatever the inputs are


def test_blocks_may_be_changed() -> None:
    gram = positive_definite(1, 4)
    before = gram.clone()
    for block in kept_blocks(gram, torch.ones(2, 4, dtype=torch.bool)):
        block.gram.zero_()
    assert torch.equal(gram, before)


def test_inverted_says_when_a_block_is_not_positive_definite() -> None:
    blocks = positive_definite(3, 5)
    found = inverted(blocks)
    assert found is not None
    torch.testing.assert_close(found, torch.linalg.inv(blocks), rtol=1e-9, atol=1e-12)
    blocks[1, 2, 2] = -1.0
    assert inverted(blocks) is None


@pytest.mark.parametrize("size", [3, 8, 9, 31])
def test_the_root_of_the_inverse_by_halves(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_UNSPLIT_COLUMNS", 8)
    blocks = positive_definite(3, size)
    root, infos = inverse_root(blocks)
    expected = torch.linalg.inv(torch.linalg.cholesky(blocks))
    torch.testing.assert_close(root, expected, rtol=1e-9, atol=1e-11)
    assert not torch.cat(infos).any()
    assert len(infos) == {3: 1, 8: 1, 9: 2, 31: 4}[size]
    for place in (0, size - 1):  # in the first half or the last
        broken = blocks.clone()
        broken[1, place, place] = -1.0
        assert torch.cat(inverse_root(broken)[1]).any()


@pytest.mark.parametrize("relative", [0.01, 1e-6])
def test_damping_is_relative_to_the_mean_diagonal_of_each_group(relative: float) -> None:
    gram = positive_definite(3, 4) * torch.tensor([1.0, 100.0, 1e-4]).double().view(3, 1, 1)
    for own, result in zip(gram, damped(gram, relative), strict=True):
        expected = own + relative * float(own.trace()) / 4 * torch.eye(4).double()
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)


def test_damping_rises_by_tens_until_the_matrix_is_positive_definite() -> None:
    """Eigenvalues are 4 and -1e-3; the mean diagonal is close to 2."""
    vectors = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / math.sqrt(2)
    gram = (vectors * torch.tensor([4.0, -1e-3])) @ vectors.T
    for relative in (1e-6, 1e-5, 1e-4, 1e-3):
        added = (damped(gram[None], relative) - gram)[0]
        torch.testing.assert_close(added, 1e-3 * gram.trace() / 2 * torch.eye(2, dtype=torch.float64))
    added = (damped(gram[None], 0.0) - gram)[0]  # without damping: from 1e-10 on
    torch.testing.assert_close(added, 1e-3 * gram.trace() / 2 * torch.eye(2, dtype=torch.float64))


def test_nothing_is_added_where_nothing_is_needed() -> None:
    gram = positive_definite(2, 3)
    assert torch.equal(damped(gram, 0.0), gram)


def test_dead_inputs_are_damped_by_the_number_itself() -> None:
    torch.testing.assert_close(damped(torch.zeros(1, 3, 3), 0.01), 0.01 * torch.eye(3)[None])


def test_what_cannot_be_damped_is_refused() -> None:
    for value in (math.nan, math.inf):
        gram = positive_definite(1, 3)
        gram[0, 1, 1] = value
        with pytest.raises(InputError, match="inputs are not finite"):
            damped(gram, 0.01)
    gram = torch.diag_embed(torch.tensor([[1e9, -1e9]]).double())  # a second moment has no negative diagonal
    with pytest.raises(InputError, match="stay singular at a relative damping of 10; are all"):
        damped(gram, 1e-10)
