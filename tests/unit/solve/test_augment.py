"""Views of images: crops, mirror images and mixtures of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from snows.data.samples import Samples, read_samples
from snows.errors import ArgumentError
from snows.graph.kind import is_image
from snows.solve.augment import random_views, with_mirrored


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


def draws(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    """The random numbers of a batch, in their order: sides, shifts, directions, shares, and whether views are mixed."""
    generator = torch.Generator().manual_seed(seed)
    side = (0.35 + 0.65 * torch.rand(count, generator=generator)).sqrt()
    shift = (1 - side)[:, None] * (2 * torch.rand(count, 2, generator=generator) - 1)
    direction = torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0)
    share = torch.rand(count, generator=generator)
    return side, shift, direction, share, float(torch.rand((), generator=generator)) < 0.5


@pytest.mark.parametrize("seed", range(6))
def test_views_are_where_the_random_numbers_say(seed: int) -> None:
    """On an image whose values are the positions of its pixels, the view's values are where they were taken."""
    places = (2 * torch.arange(16.0) + 1) / 16 - 1
    for axis, image in ((0, places.expand(16, 16)), (1, places[:, None].expand(16, 16))):
        side, shift, direction, share, mixed = draws(5, seed)
        scale = side * direction if axis == 0 else side
        line = scale[:, None] * places + shift[:, axis, None]
        expected = line[:, None, :].expand(5, 16, 16) if axis == 0 else line[:, :, None].expand(5, 16, 16)
        if mixed:
            expected = share[:, None, None] * expected + (1 - share[:, None, None]) * expected.flip(0)
        views = random_views(image.expand(5, 1, 16, 16).contiguous(), torch.Generator().manual_seed(seed))
        inside = slice(4, 12)  # away from the edges, where views are reflected
        torch.testing.assert_close(views[:, 0, inside, inside], expected[:, inside, inside], rtol=0, atol=1e-5)
    assert {draws(5, each)[4] for each in range(6)} == {True, False}


def table(*leaves: object, labels: Tensor | None = None, count: int = 2) -> Samples:
    samples = read_samples(torch.zeros(count, 3), nn.Linear(3, 3))
    return replace(samples, leaves=list(leaves), count=count, labels=labels)


def test_mirrored_images_follow_their_originals() -> None:
    images, vectors = torch.randn(2, 3, 16, 20), torch.randn(2, 20)
    mirrored = with_mirrored(table(images, vectors, torch.tensor(7.0), "word", labels=torch.tensor([4, 5])))
    one, other, scalar, word = mirrored.leaves
    assert mirrored.count == 4
    assert torch.equal(one[:2], images)
    assert torch.equal(one[2:], images.flip(3))
    assert torch.equal(other, torch.cat([vectors, vectors]))
    assert (scalar, word) == (7.0, "word")
    assert mirrored.labels is not None
    assert mirrored.labels.tolist() == [4, 5, 4, 5]
    assert with_mirrored(table(images)).labels is None


def test_what_is_no_image_is_not_mirrored() -> None:
    with pytest.raises(ArgumentError, match=r"mirror is for images .*; inputs are \[\(2, 20\), \(2, 3, 8, 8\)\]"):
        with_mirrored(table(torch.randn(2, 20), torch.randn(2, 3, 8, 8), "word"))


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
