"""The command that shows where a vision transformer looks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import ArgumentError, InputError
from ..app import app
from ..arguments import (
    ConfigOption,
    DataOption,
    DebugOption,
    DeviceOption,
    ModelArgument,
    PrunedOption,
    QuietOption,
    SeedOption,
    WeightsOption,
)
from ..request import Request

if TYPE_CHECKING:
    from torch import nn

_FileOption = Annotated[Path, typer.Option("--out", help="The picture (.png). A file of that name is replaced.")]
_ImagesOption = Annotated[int, typer.Option("--images", min=1, help="How many images of the data to show.")]


@app.command(short_help="Where a vision transformer looks, as pictures.")
def attention(
    model: ModelArgument = None,
    data: DataOption = None,
    weights: WeightsOption = None,
    pruned: PrunedOption = None,
    images: _ImagesOption = 4,
    out: _FileOption = Path("attention.png"),
    device: DeviceOption = None,
    seed: SeedOption = 0,
    quiet: QuietOption = False,
    config: ConfigOption = None,
    debug: DebugOption = False,
) -> None:
    """Attention maps of a vision transformer, side by side: the image, dense, mask only, re-adjusted.

    Each map is the attention of the class token to the patches in the last block, the mean over heads.
    """
    from torch import Tensor

    from ...evaluation.attention_figure import attention_maps, draw, drawing_library
    from ...reading import is_folder
    from ...results.files import check_writable
    from ..tables import make_console

    if out.suffix != ".png" or is_folder(out):
        raise ArgumentError(f"--out is {out}; expected a file that ends in .png")
    check_writable(out)
    drawing_library()
    request = Request.read(model, data, weights, images, seed, config, device, quiet)
    dense, read = request.model_and_data()
    shown = read.samples(False)
    if not isinstance(shown, Tensor) or shown.ndim != 4:
        raise InputError("the data holds no table of images; expected a folder or an npz file of images")
    networks = {"dense": dense} if pruned is None else _networks(dense, pruned)
    place = next(dense.parameters())
    with request.step("computing attention maps"):
        maps = attention_maps(networks, shown[:images].to(place.device, place.dtype))
    draw(maps, shown[:images], out)
    if not quiet:
        make_console().print(f"Saved to {out}")


def _networks(dense: nn.Module, pruned: Path) -> dict[str, nn.Module]:
    """The dense network, masked, and with the weights of the result."""
    from ...data.preparation import with_weights
    from ...results.reading import read_result

    result = read_result(pruned, dense)
    if result.report.permutation is not None:
        raise InputError(
            f"{pruned} was pruned with --permute, which re-orders channels, so that its masks are none of the dense "
            "weights; give a result without it"
        )
    weights = dict(dense.named_parameters())
    masked = {name: weights[name].detach() * mask.to(weights[name].device) for name, mask in result.masks.items()}
    return {"dense": dense, "mask only": with_weights(dense, masked), "re-adjusted": result.model}
