"""Views of images: crops, mirror images and mixtures of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from snows.graph.kind import is_image
from snows.solve.augment import random_views


def test_views_are_crops_of_the_image_itself() -> None:
    """A ramp from left to right stays one, mirrored or not, with values from within the image."""
    ramp = torch.linspace(-1, 1, 32).expand(64, 3, 32, 32).contiguous()
    views = random_views(ramp, _until_unmixed(ramp))
    steps = views.diff(dim=3)[:, :, :, 1:-1]
    rising, falling = (steps >= -1e-5).flatten(1).all(1), (steps <= 1e-5).flatten(1).all(1)
    assert (rising | falling).all()
    assert 10 < int(rising.sum()) < 54
    assert float(views.abs().max()) <= 1 + 1e-5
    widths = views[:, 0, 0].amax(1) - views[:, 0, 0].amin(1)
    assert float(widths.min()) > 2 * 0.35**0.5 * 0.9
    assert views.shape == ramp.shape


def test_mixed_views_lie_between_two() -> None:
    halves = torch.cat([torch.zeros(8, 1, 16, 16), torch.ones(8, 1, 16, 16)])
    seeds = (random_views(halves, torch.Generator().manual_seed(seed)) for seed in range(40))
    shares = [float(((views > 0.01) & (views < 0.99)).float().mean()) for views in seeds]
    assert 10 < sum(share > 0.5 for share in shares) < 30
    assert all(share in (0.0,) or share > 0.5 for share in shares)


def _until_unmixed(images: Tensor) -> torch.Generator:
    """A generator whose next views are not mixed: constant images stay what they are."""
    marks = torch.arange(len(images), dtype=torch.float32).view(-1, 1, 1, 1).expand_as(images)
    for seed in range(100):
        if torch.allclose(random_views(marks, torch.Generator().manual_seed(seed)), marks, atol=1e-3):
            return torch.Generator().manual_seed(seed)
    raise AssertionError("every batch was mixed")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.rand(2, 3, 16, 16), True),
        (lambda: torch.rand(2, 1, 28, 28), True),
        (lambda: torch.rand(2, 3, 8, 8), False),
        (lambda: torch.rand(2, 64, 32, 32), False),
        (lambda: torch.randint(0, 9, (2, 3, 16, 16)), False),
        (lambda: torch.rand(2, 16), False),
        (lambda: "words", False),
    ],
)
def test_what_is_an_image(make: Callable[[], object], expected: bool) -> None:
    assert is_image(make()) is expected
