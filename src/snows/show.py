"""Results as tables on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from .inspection import Inspection
    from .report import Report


def print_prune(report: Report, out: Path | None, as_json: bool, quiet: bool) -> None:
    if as_json:
        print(report.to_json())
        return
    if quiet:
        return
    console = make_console()
    if report.evaluation:
        console.print(evaluation_table(report.evaluation, None))
    console.print(
        f"{report.model} to {report.pattern}: {report.sparsity:.1%} of {len(report.layers)} layers removed, "
        f"{report.network_sparsity:.1%} of the network; {report.samples} samples, {report.seconds:.1f} s",
    )
    for layer in report.dense_layers:
        console.print(f"  left dense: {layer.name}: {layer.reason}")
    if out is None:
        console.print("Nothing was saved: pass --out DIR to keep the result.")
    else:
        console.print(f"Saved to {out}")


def evaluation_table(rows: list[dict[str, Any]], samples: int | None) -> Table:
    titles = {"top1": "top-1", "top5": "top-5", "loss": "loss", "agreement": "agreement", "kl": "KL to dense"}
    table = Table(title=None if samples is None else f"{samples} samples")
    table.add_column("network")
    columns = [key for key in titles if key in rows[0]]
    for key in columns:
        table.add_column(titles[key], justify="right")
    for row in rows:
        cells = [f"{row[key]:.2%}" if key in ("top1", "top5", "agreement") else f"{row[key]:.4f}" for key in columns]
        table.add_row(row["network"], *cells)
    return table


def print_inspection(found: Inspection) -> None:
    console = make_console()
    table = Table(title=f"{found.model}: {found.network_weights:,} weights; {found.samples} samples")
    for title in ("layer", "shape", "pattern", "K", "curvature", "memory", "time"):
        table.add_column(title, justify="left" if title in ("layer", "shape", "pattern", "curvature") else "right")
    for layer in found.layers:
        if layer.pattern is not None:
            memory, seconds = f"{layer.memory_bytes / 2**30:.2f} GiB", f"{layer.seconds:.1f} s"
            shape = "x".join(map(str, layer.shape))
            table.add_row(layer.name, shape, layer.pattern, str(layer.horizon), layer.curvature, memory, seconds)
    console.print(table)
    for layer in found.layers:
        if layer.pattern is None:
            console.print(f"  left dense: {layer.name} ({'x'.join(map(str, layer.shape))}): {layer.reason}")
    console.print(
        f"estimates for {found.sweeps} sweeps: {found.memory_bytes / 2**30:.1f} GiB at the peak, "
        f"{found.seconds:.0f} s here",
    )


def make_console() -> Console:
    """Names of layers and files are printed as they are, not read as markup."""
    return Console(markup=False, highlight=False)
