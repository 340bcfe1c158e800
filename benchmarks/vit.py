"""How much of a vision transformer survives: ViT-Ti/16, no labels, no retraining.

    python benchmarks/vit.py accuracy     # roles, patterns and masks, on validation images
    python benchmarks/vit.py ablation     # what each part of the recipe brings, on held-out calibration images
    python benchmarks/vit.py sizes        # ViT-B/16 and ViT-L/16 with random weights: time and memory

One JSON file a section under benchmarks/results; rows that it has are not measured again (remove the file to do so).
The patch embedding and the head stay dense. Validation images decide nothing: the recipe was chosen by the ablation.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from networks import ViT, load_network, normalization
from sections import Row, Section, make_parser, measure_rows
from torch import Tensor, nn

import snows
from snows.data.sources import read_npz
from snows.recipe import DEFAULT, Recipe

ALL = "qkv,out,mlp"
TOKENS = 197  # of 224 x 224 pixels in patches of 16, and the class token
CASES = (  # layers, pattern, mask
    ("qkv", "2:4", "magnitude"),
    ("mlp", "2:4", "magnitude"),
    (ALL, "2:4", "magnitude"),
    (ALL, "0.5", "magnitude"),
    (ALL, "0.5", "sparsegpt"),
)
LAYERWISE = {"horizon": 0, "finish_steps": 0, "sweeps": 1}
CASCADE = {"horizon": 12, "finish_steps": 0, "sweeps": 1}
ABLATION: dict[str, dict[str, Any]] = {
    "layer-wise (K=0), dense stream": {**LAYERWISE, "targets": "dense-stream"},
    "layer-wise (K=0)": LAYERWISE,
    "K=4": {**LAYERWISE, "horizon": 4},
    "K=12": CASCADE,
    "K=12, exact Hessian": {**CASCADE, "curvature": "hessian"},
    "K=12, dense stream": {**CASCADE, "targets": "dense-stream"},
    "K=12, dense stream, exact Hessian": {**CASCADE, "targets": "dense-stream", "curvature": "hessian"},
    "K=12, dense stream, three sweeps": {**CASCADE, "targets": "dense-stream", "sweeps": 3},
    "layer-wise, then the last stage": {"horizon": 0, "sweeps": 1},
    "K=4, then the last stage": {"horizon": 4, "sweeps": 1},
    "K=12, then the last stage": {"horizon": 12, "sweeps": 1},
    "K=12, mean squared errors": {**CASCADE, "normalization": "mean"},
}


def _class_token_error(found: Tensor, wanted: Tensor) -> Tensor:
    """The first token counts as much as all others together."""
    error = (found - wanted).square()
    if TOKENS not in error.shape:
        return error.mean()
    axis = error.shape.index(TOKENS)
    return (error.select(axis, 0).mean() + error.narrow(axis, 1, TOKENS - 1).mean()) / 2


PARTS: dict[str, dict[str, Any]] = {  # what is taken out of the last stage, or put otherwise
    "last stage, images as they are": {"snows.solve.distill.random_views": lambda images, generator: images},
    "last stage, biases and norms as they are": {"snows.graph.graph.Graph.vectors": []},
    "last stage, outputs alone": {"snows.solve.distill._OUTPUT_SHARE": 1.0},
    "last stage, outputs and operations by half": {"snows.solve.distill._OUTPUT_SHARE": 0.5},
    "last stage, class token as much as all patches": {"snows.solve.distill._error": _class_token_error},
    "last stage, a tenth of the steps": {
        "snows.solve.settings._TRANSFORMER_DISTILL": {"finish_steps": 150, "finish_rate": 1e-3}
    },
}
SIZES = {  # width, depth, heads; K of the paper's tables; blocks to time; memory
    "vit-b": (768, 12, 12, 3, 3, None),
    "vit-l": (1024, 24, 16, 1, 1, "80GiB"),
}
SAMPLES = 5000


def main() -> None:
    parser = make_parser(__doc__, SECTIONS)
    parser.add_argument("--layers", help="of the ablation: only these (qkv, out, mlp, names or globs)")
    parser.add_argument("--only", nargs="*", help="of the ablation: only these rows")
    options = parser.parse_args()
    warnings.simplefilter("ignore", snows.SnowsWarning)
    measure_rows(SECTIONS[options.section](options), options.out / f"vit-{options.section}.json", options.device)


def accuracy(options: argparse.Namespace) -> Section:
    model = load_network("vit", options.shared).to(options.device)
    calibration = _images(options, "imagenet_calibration.npz")[0][: options.samples]
    parts = [_images(options, f"imagenet_val_{part}.npz") for part in "ab"]
    x, y = torch.cat([x for x, _ in parts])[: options.samples], torch.cat([y for _, y in parts])[: options.samples]
    yield {"layers": "none", "pattern": "dense"}, lambda: _figures(model, x, y)
    for layers, pattern, mask in CASES:
        for solver in (None, "newton"):
            what = {"layers": layers, "pattern": pattern, "mask": mask, "snows": solver is not None}

            def measure(what: Row = what, solver: Any = solver) -> Row:
                result, facts = _pruned(
                    model, calibration, what["pattern"], DEFAULT, mask=what["mask"], layers=what["layers"],
                    solver=solver,
                )  # fmt: skip
                return {**_figures(result, x, y), **facts}

            yield what, measure


def ablation(options: argparse.Namespace) -> Section:
    """Fitted to 800 calibration images, judged on the other 200 by how the dense network sees them."""
    model = load_network("vit", options.shared).to(options.device)
    images = _images(options, "imagenet_calibration.npz")[0]
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(5))]
    fitted, held_out = images[:800][: options.samples], images[800:][: options.samples]
    layers = options.layers or ALL
    for name in [*ABLATION, *PARTS]:
        if options.only and name not in options.only:
            continue

        def measure(name: str = name) -> Row:
            recipe = DEFAULT.replace(**ABLATION.get(name, {}))
            with ExitStack() as patched:
                for part, value in PARTS.get(name, {}).items():
                    patched.enter_context(mock.patch(part, value))
                result, facts = _pruned(model, fitted, "2:4", recipe, layers=layers)
            found = snows.evaluate(result, held_out, dense=model)
            return {"kl": round(found["kl"], 4), "agreement": round(found["agreement"], 4), **facts}

        yield {"layers": layers, "recipe": name}, measure


def sizes(options: argparse.Namespace) -> Section:
    """The first blocks of the cascade at the paper's K; all blocks are alike, so the rest is projected."""
    count = options.samples or SAMPLES
    for name, (width, depth, heads, horizon, blocks, memory) in SIZES.items():
        shape, what = (width, depth, heads), {"network": name, "horizon": horizon, "samples": count, "blocks": blocks}

        def measure(shape: Any = shape, horizon: int = horizon, blocks: int = blocks, memory: Any = memory) -> Row:
            torch.manual_seed(0)
            model = ViT(*shape).to(options.device)
            images = torch.rand(count, 3, 224, 224) * 2 - 1
            recipe = DEFAULT.replace(horizon=horizon, finish_steps=0)
            layers = [f"blocks.{block}.*" for block in range(blocks)]
            facts = _pruned(model, images, "2:4", recipe, layers=layers, memory=memory)[1]
            inside = facts["seconds_of_solves"]
            projected = facts["seconds"] + inside * (shape[1] / blocks - 1)
            return {**facts, "memory": memory, "projected_seconds": round(projected)}

        yield what, measure


def _pruned(model: nn.Module, x: Tensor, pattern: str, recipe: Recipe, **options: Any) -> tuple[nn.Module, Row]:
    began = time.perf_counter()
    result = snows.prune(model, x, pattern, recipe=recipe, progress=False, **options)
    report = result.report
    facts: Row = {
        "seconds": round(time.perf_counter() - began, 1),
        "seconds_of_solves": round(sum(s.seconds for layer in report.layers for s in layer.solves), 1),
        "peak_memory_bytes": report.peak_memory_bytes,
        "layers_pruned": len(report.layers),
        "events": report.solve_outcomes,
    }
    if report.finish is not None:
        facts["finish"] = report.finish.__dict__
    return result.model, facts


def _figures(model: nn.Module, x: Tensor, y: Tensor) -> Row:
    found = snows.evaluate(model, x, y)
    return {name: round(100 * found[name], 2) for name in ("top1", "top5")}


def _images(options: argparse.Namespace, file: str) -> tuple[Tensor, Tensor]:
    x, y = read_npz(options.shared / "data" / file, *normalization("vit"))
    return x, torch.empty(0) if y is None else y


SECTIONS: dict[str, Callable[[argparse.Namespace], Section]] = {
    "accuracy": accuracy, "ablation": ablation, "sizes": sizes,
}  # fmt: skip


if __name__ == "__main__":
    main()
