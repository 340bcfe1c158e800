"""The empirical Fisher matrix against explicit sums and inverses."""

from __future__ import annotations

import math

import pytest
import torch

from snows.masks.cap import CAP
from snows.masks.chita import CHITA
from snows.masks.falcon import FALCON
from snows.masks.fisher import FisherBlock, joint_update, slices
from snows.masks.woodfisher import WoodFisher
from snows.patterns import Unstructured
from tests.masks import TWO_LAYERS, FakeNetwork, fisher_of


@pytest.mark.parametrize(("samples", "width"), [(6, 11), (15, 7), (1, 4)])
def test_a_fisher_block_is_the_rank_one_recursion_and_the_inverse(samples: int, width: int) -> None:
    generator = torch.Generator().manual_seed(samples)
    g = torch.randn(samples, width, generator=generator, dtype=torch.float64)
    damping = 1e-3
    recursion = torch.eye(width, dtype=torch.float64) / damping
    for row in g:
        v = recursion @ row
        recursion = recursion - torch.outer(v, v) / (samples + row @ v)
    inverse = torch.linalg.inv(fisher_of(g, damping))
    torch.testing.assert_close(recursion, inverse, rtol=1e-8, atol=1e-8)
    block = FisherBlock(g, damping)
    vector = torch.randn(width, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(block.solve(vector), inverse @ vector, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(block.inverse_diagonal(), inverse.diagonal(), rtol=1e-8, atol=1e-8)


def test_slices_cover_everything_in_nearly_equal_parts() -> None:
    for size in range(1, 40):
        for block in (1, 2, 7, 39, 100):
            parts = list(slices(size, block))
            assert [p for part in parts for p in range(size)[part]] == list(range(size))
            lengths = [part.stop - part.start for part in parts]
            assert max(lengths) <= block
            assert max(lengths) - min(lengths) <= 1
            assert len(parts) == math.ceil(size / block)


@pytest.mark.parametrize("kept_share", [0.3, 0.8])
def test_the_joint_update_is_the_ridge_solution_and_that_of_the_pruned_block(kept_share: float) -> None:
    generator = torch.Generator().manual_seed(2)
    g = torch.randn(6, 12, generator=generator, dtype=torch.float64)
    w = torch.randn(12, generator=generator, dtype=torch.float64)
    kept = torch.rand(12, generator=generator) < kept_share
    damping = 1e-2
    found = joint_update(g, w, kept, damping)
    # the ridge regression of G w on G_S towards w_S
    x = g[:, kept]
    ridge = 6 * damping * torch.eye(int(kept.sum()), dtype=torch.float64)
    solved = torch.linalg.solve(x.T @ x + ridge, x.T @ (g @ w) + ridge @ w[kept])
    torch.testing.assert_close(found[kept], solved, rtol=1e-8, atol=1e-10)
    assert not found[~kept].any()
    # CBS writes the same as [F^-1]_KK lambda = w_K, w - F^-1 lambda
    inverse = torch.linalg.inv(fisher_of(g, damping))
    price = torch.linalg.solve(inverse[~kept][:, ~kept], w[~kept])
    torch.testing.assert_close(found, w - inverse[:, ~kept] @ price, rtol=1e-7, atol=1e-9)


def test_fisher_methods_use_the_mean_of_a_batch_and_the_gradients_asked_for() -> None:
    network = FakeNetwork(TWO_LAYERS, Unstructured(0.4, "uniform"), samples=12)
    halves = FakeNetwork(TWO_LAYERS, Unstructured(0.4, "uniform"), samples=12)
    halves.rows = {name: (rows[:8:2] + rows[1:8:2]) / 2 for name, rows in halves.rows.items()}
    for asked, plain in (
        (WoodFisher(gradients=4, batch=2), WoodFisher()),
        (CAP(gradients=4, batch=2, damping=1e-3), CAP(damping=1e-3)),
        (CHITA(gradients=4, batch=2), CHITA()),
        (FALCON(solver=CHITA(gradients=4, batch=2)), FALCON()),
    ):
        one, two = asked.choose(network), plain.choose(halves)
        for name in TWO_LAYERS:
            assert torch.equal(one.masks[name], two.masks[name])
            torch.testing.assert_close(one.weights[name], two.weights[name], rtol=1e-6, atol=1e-8)
