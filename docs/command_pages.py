"""The directive `{commands}`: every command with its arguments and options, from the command line itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))  # of this checkout, before one that is installed

from snows.cli.commands import app as application


class Commands(SphinxDirective):
    """One section for each command."""

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # the text is not in the page, so that its date says nothing
        holder = nodes.container()
        self.state.nested_parse(
            StringList(lines(), source="the command line"), self.content_offset, holder, match_titles=True
        )
        return holder.children


def lines() -> list[str]:
    """The sections as Markdown."""
    commands: dict[str, Any] = typer.main.get_command(application).commands  # type: ignore[attr-defined]
    return [line for name, command in commands.items() for line in section(name, command)]


def section(name: str, command: Any) -> list[str]:
    text = [paragraph.replace("\n", " ").strip() for paragraph in (command.help or "").split("\n\n")]
    table = ["| | |", "|---|---|", *(row(parameter) for parameter in command.params if parameter.name != "help")]
    return [f"## snows {name}", "", *(line for paragraph in text for line in (paragraph, "")), *table, ""]


def row(parameter: Any) -> str:
    """A row of the table: how it is written, and what it means."""
    is_option = parameter.param_type_name == "option"
    written = ", ".join(parameter.opts) if is_option else parameter.metavar or parameter.name.upper()
    help = " ".join((parameter.help or "").split())
    if is_option and parameter.default not in (None, False, "") and "[default" not in help:
        shown = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
        help += f" [default: {shown}]"
    return f"| `{written}` | {escaped(help)} |"


def escaped(text: str) -> str:
    """As text of a cell: nothing in it is markup."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|{}$#" else letter for letter in text)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True}
