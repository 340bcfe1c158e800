"""An export as a table on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from .tables import make_console

if TYPE_CHECKING:
    from ..exports.exporting import Exported

_SHOWN_FACTS = ("opset", "command", "pack", "dense_bytes")


def print_export(exported: Exported) -> None:
    console = make_console()
    table = Table()
    for title in ("file", "bytes", "zipped"):
        table.add_column(title, justify="left" if title == "file" else "right", overflow="fold")
    for name, size in exported.files.items():
        table.add_row(name, f"{size.bytes:,}", f"{size.zipped:,}")
    console.print(table)
    for name in _SHOWN_FACTS:
        if name in exported.facts:
            value = exported.facts[name]
            console.print(f"{name.replace('_', ' ')}: {', '.join(value) if isinstance(value, list) else value}")
    for note in exported.notes:
        console.print(f"note: {note}")
    if exported.differences:
        batches = ", ".join(map(str, exported.differences))
        worst = max(exported.differences.values())
        console.print(f"outputs at batch sizes {batches}: at most {worst:.1e} of the largest from the model's")
    console.print(f"{exported.removed:,} removed weights are zero in it. Written to {exported.folder}")
