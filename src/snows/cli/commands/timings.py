"""The command that times a saved result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...errors import ArgumentError
from ...reading import look
from ..app import app
from ..arguments import CheckedModelOption, DebugOption, DeviceOption, JsonOption, QuietOption, SavedArgument
from ..request import require_new_json
from .deploying import named_model

_BatchOption = Annotated[str, typer.Option("--batch", help="Batch sizes, with commas.")]
_EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="torch, onnxruntime, openvino, with commas. [default: torch, and on a CPU those that are installed]",
        show_default=False,
    ),
]
_ModeOption = Annotated[
    str | None,
    typer.Option(
        "--mode",
        help="How torch runs the network: eager, compiled, and on a GPU graph, compiled graph; with commas. [default: "
        "all]",
        show_default=False,
    ),
]
_TypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="On a GPU: float16 or bfloat16. [default: float16]", show_default=False),
]
_LimitOption = Annotated[float, typer.Option("--limit", help="Seconds. What is not timed in them is listed.")]
_FileOption = Annotated[
    Path | None,
    typer.Option("--out", help="A file for all figures (.json), which `--layers FILE` reads.", show_default=False),
]
_ForceOption = Annotated[bool, typer.Option("--force", help="Replace the file of --out if it holds other timings.")]


@app.command(short_help="Time a saved result on this machine.")
def bench(
    directory: SavedArgument,
    model: CheckedModelOption = None,
    batch: _BatchOption = "1,8,32",
    engine: _EngineOption = None,
    mode: _ModeOption = None,
    device: DeviceOption = None,
    dtype: _TypeOption = None,
    limit: _LimitOption = 120.0,
    out: _FileOption = None,
    force: _ForceOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Time a saved result on this machine: each layer and the whole network, dense and sparse.

    Says what runs sparse here, where layers could, and which layers to prune if speed is the goal.
    """
    from ...timing.benchmarking import bench as run
    from ..bench_table import print_bench
    from ..tables import make_console, say

    batches = _batches(batch)
    _check_out(out, force)
    engines, modes = _words(engine), _words(mode)
    found = run(
        directory, named_model(model), batches=batches, engines=engines, modes=modes, device=device, dtype=dtype,
        limit=limit, progress=not (quiet or as_json),
    )  # fmt: skip
    if out is not None:
        found.save(out)
    if as_json:
        print(found.to_json())
    elif not quiet:
        print_bench(found, make_console())
        if out is not None:
            use = f". Use it: snows prune … --layers {out}" if found.prune else ""
            say(f"Saved to {out}{use}")


def _check_out(out: Path | None, force: bool) -> None:
    """Before anything is timed: the file can be written. With `force` it may replace other timings, nothing else."""
    from ...data.layer_lists import is_layer_list
    from ...results.files import check_writable

    if force and out is None:
        raise ArgumentError("--force says that a file may be replaced; expected --out FILE with it")
    if out is None or not force or look(out) is None:
        require_new_json(out, otherwise="say that it may be replaced (--force)")
    elif is_layer_list(out):
        check_writable(out)
    else:
        raise ArgumentError(f"{out} was not written by snows bench, so it is not replaced; choose another name")


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",")]


def _batches(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ArgumentError(f"--batch is {text!r}; expected whole numbers with commas, such as 1,8,32") from None
