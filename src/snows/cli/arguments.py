"""Arguments and options of the commands. Those that several commands share are defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..masks.names import NAMES, WITHOUT_LOSS

MASKS = ", ".join(NAMES)
COMPARED_MASKS = ",".join(WITHOUT_LOSS)

# What to work on

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        help="resnet20-fashion (embedded, the default), torchvision:NAME, timm:NAME, hf:NAME or hf:FOLDER, or "
        "file.py:factory (which runs your own code).",
        show_default=False,
    ),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="fashion (embedded, the default for the embedded model), folder:DIR (images; class folders are "
        "labels), npz:FILE (arrays x, y or jpeg, offsets, labels; tokens as whole numbers x), or file.py:factory "
        "(which runs your own code).",
        show_default=False,
    ),
]
WeightsOption = Annotated[
    Path | None,
    typer.Option(
        "--weights", help="Weights for the model: .safetensors, or .pt with tensors only.", show_default=False
    ),
]
SamplesOption = Annotated[
    int | None,
    typer.Option(
        "--samples",
        min=1,
        help="Calibration samples. [default: 1000 for the embedded data, else 3000]",
        show_default=False,
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A TOML file: [data] mean, std, size; [recipe] any setting of a recipe.",
        show_default=False,
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="cpu, cuda … Not mps: it has no double precision. [default: a GPU if there is one]",
        show_default=False,
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory",
        help="Device memory to use at most, weights included, such as 24GiB. [default: what is free on a GPU, 16 GiB "
        "beside the weights on a CPU]",
        show_default=False,
    ),
]
WorldSizeOption = Annotated[
    int, typer.Option("--world-size", help="Plan for so many processes that share the samples; see torchrun.", min=1)
]
SeedOption = Annotated[int, typer.Option("--seed", help="Decides the order of the samples and all random numbers.")]

# How to prune

PatternOption = Annotated[
    str | None,
    typer.Option(
        "--pattern",
        help="N:M (N kept of every M input channels), a sparsity such as 0.7, or several: '1:4, layer1.*=2:4, "
        "head=dense'. [default: 1:4 for the embedded model, else 2:4; not needed with --mask weights]",
        show_default=False,
    ),
]
PatternsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pattern",
        help="Patterns, with commas or by repeating the flag: --pattern 1:4,2:4 --pattern 0.7. A pattern that names "
        "layers stands alone: --pattern '1:4, layer1.*=2:4'. [default: 1:4 for the embedded model, else 2:4]",
        show_default=False,
    ),
]
MaskOption = Annotated[
    str,
    typer.Option(
        "--mask",
        help=f"{MASKS}, weights (zeros are the mask), or a file of masks or of pruned weights (.safetensors, .pt, "
        ".pth).",
    ),
]
MasksOption = Annotated[
    list[str] | None,
    typer.Option(
        "--mask",
        help="Masks as of `snows prune`, with commas or by repeating the flag. Masks that are complete (weights, a "
        f"file) take no pattern. [default: {COMPARED_MASKS}]",
        show_default=False,
    ),
]
LayersOption = Annotated[
    str | None,
    typer.Option(
        "--layers",
        help="Names, globs or roles (qkv, out, mlp) to prune, with commas, or a file of `snows bench`. "
        "[default: all but first and last]",
        show_default=False,
    ),
]
ExcludeOption = Annotated[
    str | None,
    typer.Option("--exclude", help="Names, globs or roles to leave dense, with commas.", show_default=False),
]
HorizonOption = Annotated[
    int | None,
    typer.Option(
        "--horizon", min=0, help="K: operations after a layer whose outputs are preserved.", show_default=False
    ),
]
RecipeOption = Annotated[
    str | None,
    typer.Option("--recipe", help="paper, default, or a recipe.json; overrides --effort.", show_default=False),
]
EffortOption = Annotated[
    str | None,
    typer.Option(
        "--effort",
        help="fast: minutes on a laptop with 128 to 256 samples; default; best: for a GPU and patience. [default: fast "
        "for the embedded network, else default]",
        show_default=False,
    ),
]
LabelsOption = Annotated[
    str,
    typer.Option(
        "--labels",
        help="For masks that need a loss: model (the model's own predictions) or given (labels of the data).",
    ),
]
PermuteOption = Annotated[
    bool,
    typer.Option(
        "--permute", help="Re-order channels before an N:M mask is chosen; the network computes the same function."
    ),
]

# What to keep

OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="A new folder for model, masks, report and recipe.", show_default=False),
]
CellsOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="A folder that keeps every finished network's figures, comparison.json and comparison.md. The same "
        "command continues where it was stopped.",
        show_default=False,
    ),
]
CompactOption = Annotated[
    bool, typer.Option("--compact", help="Save kept weights only: a smaller file, which snows expands.")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Replace the folder of --out if it holds another saved result.")
]
ResumeOption = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        help="A folder that keeps every finished layer: the same command continues where it was stopped.",
        show_default=False,
    ),
]
PrunedOption = Annotated[
    Path | None,
    typer.Option(
        "--pruned", help="A folder written by `snows prune --out`, to compare with the model.", show_default=False
    ),
]
SavedArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="A folder written by `snows prune --out`.", show_default=False)
]
MetricOption = Annotated[
    str | None,
    typer.Option(
        "--metric",
        help="file.py:metric, a function of your own for networks that are no classifiers: it takes an iterator of "
        "pairs (outputs, labels), one for each batch, and returns a number or {name: number}.",
        show_default=False,
    ),
]
CheckedModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The model to run on the stored inputs, named as for `snows prune`. [default: the recorded one, unless "
        "that is code of your own]",
        show_default=False,
    ),
]

# What to watch

EventsOption = Annotated[
    Path | None,
    typer.Option("--events", help="A file that gets every event of the run as a line of JSON.", show_default=False),
]
TensorBoardOption = Annotated[
    Path | None,
    typer.Option(
        "--tensorboard",
        help="A folder for TensorBoard: losses, time and memory of every layer, figures of every epoch.",
        show_default=False,
    ),
]
LiveOption = Annotated[
    bool,
    typer.Option(
        "--live",
        help="Write the report anew after every layer or epoch, for a browser: DIR-live.html beside the folder of "
        "--out, else snows-live.html.",
    ),
]

# What to print

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No progress bars and no tables.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="After a failure, also print where it came from.")]
VersionOption = Annotated[bool, typer.Option("--version", help="Print the version.")]
