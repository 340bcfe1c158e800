"""Second moments of a layer's inputs: the symmetric half that is computed once, and the energy of the targets."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import snows.linalg.large as large
from snows.data.moments import Moments, second_moment


@pytest.mark.parametrize("columns", [1, 7, 8, 33])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_wide_second_moment_is_the_whole_product(columns: int, groups: int) -> None:
    x = torch.randn(groups, 20, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with mock.patch.object(large, "_SYMMETRIC", 4):
        found = second_moment(x)
    torch.testing.assert_close(found, x.mT @ x, rtol=1e-13, atol=1e-13)
    assert torch.equal(found, found.mT) or groups > 1 or columns < 4


def test_energy_is_the_mean_square_of_the_targets() -> None:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(2, 30, 4, generator=generator), torch.randn(2, 30, 3, generator=generator)
    whole = Moments.collect([(x, y)])
    parts = Moments.collect([(x[:, :7], y[:, :7]), (x[:, 7:], y[:, 7:])])
    expected = float(y.double().square().sum()) / 30
    assert whole.energy == pytest.approx(expected, rel=1e-6)
    assert parts.energy == pytest.approx(expected, rel=1e-6)
