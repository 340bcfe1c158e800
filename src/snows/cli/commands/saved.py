"""Commands on a saved result."""

from __future__ import annotations

import typer

from ..app import app
from ..arguments import CheckedModelOption, DebugOption, JsonOption, QuietOption, SavedArgument
from ..tables import print_verification


@app.command(short_help="Check that a saved result is what was written.")
def verify(
    directory: SavedArgument,
    model: CheckedModelOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Check a saved result: every byte as written, patterns, exact zeros, and the recorded outputs.

    Prints one sentence for everything that is wrong; the exit status is then 1.
    """
    from ...results.verification import verify as check

    network = None
    if model is not None:
        from ...data.models import build_model

        network = build_model(model, pretrained=False)
    found = check(directory, network)
    print_verification(directory, found, as_json, quiet)
    if not found.ok:
        raise typer.Exit(1)
