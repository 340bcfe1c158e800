"""Commands that take a saved result to where it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...exports.formats import FORMATS
from ...listeners.progress import open_progress
from ..app import app
from ..arguments import CheckedModelOption, DebugOption, JsonOption, QuietOption, SavedArgument

if TYPE_CHECKING:
    from torch import nn

FormatOption = Annotated[str, typer.Option("--to", help=f"{', '.join(FORMATS)}.", show_default=False)]
ExportFolderOption = Annotated[
    Path | None,
    typer.Option("--out", help="A new folder. [default: DIR-FORMAT]", show_default=False),
]
ReplaceOption = Annotated[
    bool, typer.Option("--force", help="Replace the folder if it holds an export and nothing else.")
]


@app.command(short_help="Write a saved result for an engine.")
def export(
    directory: SavedArgument,
    to: FormatOption,
    model: CheckedModelOption = None,
    out: ExportFolderOption = None,
    force: ReplaceOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a saved result in the format of an engine, and check that it still is the same network.

    The result is verified first. What was written is read back and run on the stored inputs, and every removed weight
    must be zero in it.
    """
    from ...exports.exporting import export as write
    from ..export_table import print_export

    with open_progress(f"writing {to}", shown=not (quiet or as_json)):
        exported = write(directory, to, named_model(model), out=out, force=force)
    if as_json:
        print(json.dumps(exported.to_dict(), indent=2))
    elif not quiet:
        print_export(exported)


def named_model(model: str | None) -> nn.Module | None:
    """The model that the user names, without weights."""
    if model is None:
        return None
    from ...data.models import build_model

    return build_model(model, pretrained=False)
