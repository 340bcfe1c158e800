"""Attention maps of several networks side by side, as in the paper: image, dense, mask only, re-adjusted."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..results.files import write_or_rescue
from .attention import attention_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INCHES = 2.0  # of one picture
_DOTS = 110  # for each inch
_SHOWN = 0.97  # share of the patches within the range of colors


def attention_maps(networks: Mapping[str, nn.Module], images: Tensor) -> dict[str, list[Tensor]]:
    """For each network and image the mean over heads of the class token's attention: rows x columns of patches."""
    return {name: [found.mean(0) for found in attention_of(network, images)] for name, network in networks.items()}


def drawing_library() -> type[Figure]:
    """The figures of matplotlib. Asked for before the maps are computed, so that its absence costs no time.

    Raises:
        InputError: It is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("matplotlib is needed to draw; install it with: pip install 'snows[plot]'") from error
    return Figure


def draw(maps: Mapping[str, list[Tensor]], images: Tensor, path: Path) -> None:
    """Write a PNG: one row for each image, which comes first. The maps of one image share their colors.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written: then it is in a temporary folder,
            which the message names.
    """
    columns = 1 + len(maps)
    figure = drawing_library()(figsize=(_INCHES * columns, _INCHES * len(images)), layout="constrained")
    axes = figure.subplots(len(images), columns, squeeze=False)
    for row, image in enumerate(images):
        axes[row, 0].imshow(_pixels(image).numpy(), cmap="gray")
        highest = _brightest([found[row] for found in maps.values()])
        for column, found in enumerate(maps.values(), start=1):
            axes[row, column].imshow(found[row].numpy(), cmap="viridis", vmin=0, vmax=highest, interpolation="bilinear")
    for place, name in enumerate(["image", *maps]):
        axes[0, place].set_title(name, fontsize=11)
    for part in axes.flat:
        part.set_axis_off()
    picture = io.BytesIO()
    figure.savefig(picture, dpi=_DOTS, format="png")
    write_or_rescue(path, picture.getvalue())


def _brightest(maps: list[Tensor]) -> float:
    """What is drawn brightest. A few patches that a network always looks at, such as corners, may lie above it."""
    return max(float(found.float().quantile(_SHOWN)) for found in maps)


def _pixels(image: Tensor) -> Tensor:
    """rows x columns, or rows x columns x 3, between 0 and 1, whatever the normalization was."""
    image = image.detach().float().cpu()
    low, high = image.amin(), image.amax()
    scaled = (image - low) / torch.clamp(high - low, min=1e-12)
    return scaled.permute(1, 2, 0) if len(image) == 3 else scaled.mean(0)
