"""SparseGPT against a sweep with the inverse of what is free computed anew at every column."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from snows.linalg import rows as layout
from snows.masks.sparsegpt import SparseGPT
from snows.patterns import NM, Pattern
from tests.masks import damped_per_row, each_layer, layer


def test_the_factor_of_the_inverse_holds_the_inverses_of_all_tails() -> None:
    _, gram = layer("linear")
    factor = torch.linalg.cholesky(layout.inverse(gram), upper=True)[0]
    for j in range(len(factor)):
        tail = torch.linalg.inv(gram[0, j:, j:])
        assert float(factor[j, j] ** 2) == pytest.approx(float(tail[0, 0]))
        torch.testing.assert_close(factor[j, j:] / factor[j, j], tail[0] / tail[0, 0])


def naive_sweep(
    weight: Tensor, hessians: list[np.ndarray], pattern: Pattern, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """SparseGPT with the inverse of what is free computed anew at every column of every row."""
    shape = tuple(weight.shape)
    kernel = math.prod(shape[2:])
    columns = [channel * kernel + place for place in range(kernel) for channel in range(shape[1])]  # in sweep order
    rows = weight.flatten(1).numpy()[:, columns].copy()
    hessians = [h[np.ix_(columns, columns)] for h in hessians]
    count, width = rows.shape
    kept = np.ones((count, width), dtype=bool)
    step = pattern.m if isinstance(pattern, NM) else block
    for begin in range(0, width, step):
        end = min(begin + step, width)
        saliency = {
            (r, j): rows[r, j] ** 2 / np.linalg.inv(hessians[r][j:, j:])[0, 0]
            for r in range(count)
            for j in range(begin, end)
        }
        if isinstance(pattern, NM):
            gone = []
            for r in range(count):
                mine = sorted(range(begin, end), key=lambda j: saliency[r, j])
                gone += [(r, j) for j in mine[: pattern.m - pattern.n]]
        else:
            wanted = round(pattern.sparsity * count * end) - int((~kept).sum())
            gone = sorted(saliency, key=lambda place: saliency[place])[:wanted]
        for r, j in gone:
            kept[r, j] = False
        for j in range(begin, end):
            for r in range(count):
                if not kept[r, j]:
                    tail = np.linalg.inv(hessians[r][j:, j:])
                    rows[r, j:] -= tail[0] * rows[r, j] / tail[0, 0]
                    rows[r, j] = 0
    back = np.argsort(columns)
    return kept[:, back].reshape(shape), rows[:, back].reshape(shape)


@each_layer
def test_sparsegpt_is_a_sweep_column_by_column(name: str, pattern: Pattern) -> None:
    weight, gram = layer(name, seed=3)
    choice = SparseGPT(damping=0.01, block=5).choose_layer("w", weight, gram, pattern)
    mask, swept = naive_sweep(weight, damped_per_row(weight, gram, 0.01), pattern, block=5)
    assert np.array_equal(choice.masks["w"].numpy(), mask)
    torch.testing.assert_close(choice.weights["w"], torch.tensor(swept), rtol=1e-8, atol=1e-10)
    if isinstance(pattern, NM):
        assert (mask.sum(1) == weight.shape[1] * pattern.n // pattern.m).all()
        assert pattern.violations(torch.tensor(mask)) == 0
    else:
        assert int((~mask).sum()) == round(pattern.sparsity * weight.numel())
