"""The application that the commands belong to. torch is imported inside commands, so that --help is instant."""

from __future__ import annotations

import sys

import typer

from ..version import __version__
from .arguments import VersionOption

app = typer.Typer(
    name="snows",
    help="Prune a trained network without retraining and without labels.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _top(context: typer.Context, version: VersionOption = False) -> None:
    if version:
        print(f"snows {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(2)
