"""Views of images: mirror images, and random crops that are mirrored and mixed.

The dense network gives the target of every view, so that a thousand images are enough for thousands of steps.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.samples import Samples
from ..errors import ArgumentError
from ..graph.kind import is_image

_SMALLEST_CROP = 0.35  # share of the image's area
_MIXED = 0.5  # share of the batches whose images are mixed


def with_mirrored(samples: Samples) -> Samples:
    """The samples, followed by the same samples with their images mirrored left to right."""
    if not any(is_image(leaf) for leaf in samples.leaves):
        shapes = [tuple(leaf.shape) for leaf in samples.leaves if isinstance(leaf, Tensor)]
        raise ArgumentError(f"recipe: mirror is for images (samples x channels x height x width); inputs are {shapes}")
    leaves = [
        torch.cat([leaf, leaf.flip(-1) if is_image(leaf) else leaf]) if isinstance(leaf, Tensor) and leaf.ndim else leaf
        for leaf in samples.leaves
    ]
    labels = None if samples.labels is None else samples.labels.repeat(2)
    return replace(samples, leaves=leaves, count=2 * samples.count, labels=labels)


def random_views(images: Tensor, generator: torch.Generator) -> Tensor:
    """A random view of each image, of the same size: a crop, maybe mirrored. In half of the batches views are mixed."""
    count = len(images)
    side = (_SMALLEST_CROP + (1 - _SMALLEST_CROP) * torch.rand(count, generator=generator)).sqrt()  # of the crop
    shift = (1 - side)[:, None] * (2 * torch.rand(count, 2, generator=generator) - 1)
    direction = torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0)
    placed = torch.zeros(count, 2, 3)
    placed[:, 0, 0], placed[:, 1, 1], placed[:, :, 2] = side * direction, side, shift
    share = torch.rand(count, generator=generator).view(-1, 1, 1, 1)
    mixed = float(torch.rand((), generator=generator)) < _MIXED

    grid = F.affine_grid(placed.to(images), list(images.shape), align_corners=False)
    views = F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    return torch.lerp(views.flip(0), views, share.to(views)) if mixed else views
