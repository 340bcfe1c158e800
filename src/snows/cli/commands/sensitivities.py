"""The command that prunes each layer alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...devices.distributed.launch import connected
from ..app import app
from ..arguments import (
    ConfigOption,
    DataOption,
    DebugOption,
    DeviceOption,
    ExcludeOption,
    JsonOption,
    LayersOption,
    MemoryOption,
    ModelArgument,
    QuietOption,
    SamplesOption,
    SeedOption,
    WeightsOption,
)
from ..request import Request, require_new_json, split_patterns

_TriedOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pattern",
        help="Sparsities and N:M, with commas or by repeating the flag. [default: 0.3 to 0.95, 2:4 and 1:4]",
        show_default=False,
    ),
]
_LabelsOption = Annotated[
    str, typer.Option("--labels", help="model, or given: the accuracy is measured, too, with the labels of the data.")
]
_FileOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="A file for the measurements (.json), which `--pattern '0.7 measured=FILE'` reads. A page with the curves "
        "(.html) is put beside it.",
        show_default=False,
    ),
]


@app.command(short_help="How much each layer can lose.")
def sensitivity(
    model: ModelArgument = None,
    data: DataOption = None,
    weights: WeightsOption = None,
    pattern: _TriedOption = None,
    layers: LayersOption = None,
    exclude: ExcludeOption = None,
    samples: SamplesOption = None,
    labels: _LabelsOption = "model",
    out: _FileOption = None,
    memory: MemoryOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
    debug: DebugOption = False,
) -> None:
    """Prune each layer alone to several patterns: how far the outputs move, mask only and re-adjusted.

    With --labels given also the accuracy.
    """
    from ...evaluation.tolerance import PATTERNS
    from ...evaluation.tolerance import sensitivity as measure
    from ..tables import make_console, print_sensitivity

    request = Request.read(model, data, weights, samples, seed, config, device, quiet or as_json)
    require_new_json(out, ".html")
    patterns = split_patterns(pattern) if pattern else list(PATTERNS)
    dense, read = request.model_and_data()
    with connected(request.device):
        found = measure(
            dense, read.samples(labels == "given"), patterns, layers=layers, exclude=exclude, labels=labels,  # type: ignore[arg-type]  # any word; it is checked there
            device=request.device, seed=seed, memory=memory, progress=not request.quiet,
        )  # fmt: skip
    if out is not None:
        found.save(out)
        found.to_html(out.with_suffix(".html"))
    if as_json:
        print(found.to_json())
    elif not quiet:
        console = make_console()
        print_sensitivity(found, console)
        if out is None:
            console.print("Nothing was saved: pass --out FILE.json to keep the measurements.")
        else:
            console.print(f"Saved to {out}; curves in {out.with_suffix('.html')}")
            console.print(f"Use it: --pattern '0.7 measured={out}'")
