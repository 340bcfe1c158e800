"""Wide layers: one factor for all rows, beside a block for every row.

    python benchmarks/wide.py closed-form    # the closed form: its loss above that of float64 least squares
    python benchmarks/wide.py newton         # Newton-CG: products and seconds to the loss of the preconditioner before

Real layers at 2:4, magnitude masks, each pruned alone. Both ways are measured in one run. Where a block for every row
takes too much memory, version 0.12 had a diagonal preconditioner, and plain CG stands for it.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from sections import Row, Section, make_parser, measure_rows
from speed import CASCADE, Bench
from torch import Tensor

import snows
from snows.data.moments import Moments
from snows.data.preparation import capturing_once
from snows.linalg.gram import kept_blocks
from snows.recipe import Recipe
from snows.solve import layer as solver
from snows.solve.least_squares import Refit, RowBlocks, RowSystems, SharedFactor

IMAGES, HORIZON, PRODUCTS = 128, 4, 15
MORE_PRODUCTS = (15, 20, 25, 30, 40, 60)  # tried with one factor
LAYERS = (
    ("resnet50", "layer2.1.conv2"),
    ("resnet50", "layer3.1.conv1"),
    ("resnet50", "layer3.1.conv2"),
    ("resnet50", "layer4.1.conv1"),
    ("resnet50", "layer4.1.conv2"),
    ("vit", "blocks.6.mlp.fc2"),
)
IN_CLOSED_FORM = LAYERS[:3]
WITHOUT_BLOCKS = "layer4.1.conv2"  # 10 GiB
Systems = type[RowBlocks] | type[SharedFactor]


def main() -> None:
    parser = make_parser(__doc__, ("closed-form", "newton"))
    options = parser.parse_args()
    bench = Bench(argparse.Namespace(**vars(options), networks=[], checkout=None, command=None))
    warnings.simplefilter("ignore")
    rows = closed_form(bench) if options.section == "closed-form" else newton(bench)
    measure_rows(rows, options.out / f"wide-{options.section}-{options.device}.json", options.device)


def closed_form(bench: Bench) -> Section:
    for network, name in IN_CLOSED_FORM:

        def measure(network: str = network, name: str = name) -> Row:
            found: Row = {}
            refit = RowSystems.refit

            def compared(system: RowSystems, weight: Tensor, moments: Moments, judge: Any = None) -> Refit:
                """Both ways, on the very statistics that the run has for this layer."""
                least = loss(float64_least_squares(moments, system.kept), moments)
                for key, systems in (("blocks", RowBlocks), ("one_factor", SharedFactor)):
                    began = time.perf_counter()
                    solved = refit(systems(moments.gram, system.kept, CASCADE.ridge, weight.dtype), weight, moments)
                    found[f"seconds_{key}"] = round(time.perf_counter() - began, 2)
                    found[f"excess_{key}"] = float(f"{loss(solved.weight.double(), moments) / least - 1:.1e}")
                return solved

            with mock.patch.object(RowSystems, "refit", compared):
                solve(bench, network, name, CASCADE.replace(horizon=0, sweeps=1))
            return found

        yield {"network": network, "layer": name, "pattern": "2:4", "images": bench.count(IMAGES)}, measure


def loss(weight: Tensor, moments: Moments) -> float:
    """Of a layer without groups: the mean square error of its outputs."""
    return moments.energy + float((weight * (weight @ moments.gram[0] - 2 * moments.cross[0].T)).sum())


def float64_least_squares(moments: Moments, kept: Tensor) -> Tensor:
    targets = moments.cross[0].T
    result = torch.zeros_like(targets)
    for part in kept_blocks(moments.gram, kept):
        at = (part.rows[:, None], part.columns)
        result[at] = torch.linalg.solve(part.gram, targets[at] * part.real) * part.real
    return result


def newton(bench: Bench) -> Section:
    for network, name in LAYERS:

        def measure(network: str = network, name: str = name) -> Row:
            recipe = CASCADE.replace(horizon=HORIZON, sweeps=1, cg_relative_tolerance=0.0, cg_least_gain=0.0)
            before = recipe.replace(cg_steps=PRODUCTS)
            if name == WITHOUT_BLOCKS:
                before = before.replace(preconditioner=None)
            goal, seconds = solve(bench, network, name, before, RowBlocks if before.preconditioner else SharedFactor)
            found: Row = {"before": "blocks" if before.preconditioner else "none", "loss_before": goal}
            found.update(products_before=PRODUCTS, seconds_before=seconds)
            for products in MORE_PRODUCTS:
                reached, seconds = solve(bench, network, name, recipe.replace(cg_steps=products), SharedFactor)
                if reached <= 1.0005 * goal:
                    break
            return {**found, "loss": reached, "products": products, "seconds": seconds}

        yield (
            {"network": network, "layer": name, "pattern": "2:4", "horizon": HORIZON, "images": bench.count(IMAGES)},
            measure,
        )


def solve(
    bench: Bench, network: str, layer: str, recipe: Recipe, systems: Systems = SharedFactor
) -> tuple[float, float]:
    """The K-step loss of the layer, pruned alone, and the seconds of its solve.

    The loss is that of fitted samples where the solver ended, whether or not held-out samples chose these weights.
    """
    taken = [0.0]

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = work(*arguments)
            taken[0] = time.perf_counter() - began
            return result

        return call

    model, images = bench.model(network), bench.samples(network, bench.count(IMAGES))
    chosen = mock.patch.object(
        solver, "row_systems", lambda gram, kept, ridge, dtype, *_: systems(gram, kept, ridge, dtype)
    )
    with capturing_once(model), chosen, mock.patch("snows.solve.cascade.solve_layer", timed(solver.solve_layer)):
        result = snows.prune(model, images, "2:4", layers=layer, recipe=recipe, device=bench.device, progress=False)
    (report,) = result.report.layers[0].solves
    return report.losses[-1], round(taken[0], 2)


if __name__ == "__main__":
    main()
