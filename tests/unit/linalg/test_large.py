"""Linear algebra in pieces, against torch's own functions."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch
from torch import Tensor

from snows.linalg import large
from snows.linalg.large import cholesky, cholesky_inverse, cholesky_solve, eigh, product, upper_cholesky


@pytest.fixture(params=[True, False], ids=["in pieces", "whole"])
def in_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Matrices of the tests are small: pieces must be, too."""
    if request.param:
        monkeypatch.setattr(large, "_WHOLE", 7)
        monkeypatch.setattr(large, "_INVERTED_WHOLE", 5)
        monkeypatch.setattr(large, "_SYMMETRIC", 9)
        monkeypatch.setattr(large, "MOST_FLOPS", 500.0)
    return bool(request.param)


def positive_definite(*batch: int, size: int = 45) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(*batch, size + 5, size, generator=generator, dtype=torch.float64)
    return x.mT @ x + 0.1 * torch.eye(size, dtype=torch.float64)


def same(found: Tensor, expected: Tensor, in_pieces: bool) -> bool:
    return torch.allclose(found, expected, rtol=1e-10, atol=1e-10) if in_pieces else torch.equal(found, expected)


@pytest.mark.parametrize("shapes", [((31, 40), (40, 3)), ((2, 31, 40), (2, 40, 3)), ((1, 40), (40, 1))])
def test_products(shapes: tuple[tuple[int, ...], tuple[int, ...]], in_pieces: bool) -> None:
    a, b = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    assert same(product(a, b), a @ b, in_pieces)


@pytest.mark.parametrize("batch", [(), (1,), (3,)])
def test_factors_inverses_and_solutions(batch: tuple[int, ...], in_pieces: bool) -> None:
    matrix = positive_definite(*batch)
    expected = torch.linalg.cholesky(matrix)
    factor, info = cholesky(matrix)
    assert not info.any()
    assert same(factor, expected, in_pieces)
    assert same(upper_cholesky(matrix), torch.linalg.cholesky(matrix, upper=True), in_pieces)
    assert same(cholesky_inverse(expected), torch.cholesky_inverse(expected), in_pieces)
    rhs = torch.randn(*batch, 45, 20, dtype=torch.float64)
    assert same(cholesky_solve(rhs, expected), torch.cholesky_solve(rhs, expected), in_pieces)


@pytest.mark.parametrize("place", [0, 20, 44])
def test_a_matrix_that_is_not_positive_definite_is_named(place: int, in_pieces: bool) -> None:
    matrix = positive_definite(2)
    matrix[1, place, place] = -1.0
    _, info = cholesky(matrix)
    assert (info != 0).tolist() == [False, True]


def test_eigenvectors(in_pieces: bool) -> None:
    matrix = positive_definite(2)
    values, vectors = eigh(matrix)
    assert torch.allclose(vectors @ (values[..., None] * vectors.mT), matrix)


def test_errors_of_a_thread_are_raised_here() -> None:
    with pytest.raises(ZeroDivisionError):
        large._in_a_thread(lambda: 1 / 0)


def test_ctrl_c_is_noticed_while_a_thread_works() -> None:
    release = threading.Event()
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        large._in_a_thread(lambda: release.wait(10))
    assert time.monotonic() - began < 5
    release.set()
