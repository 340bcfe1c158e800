"""What the pages "Choose" and "How it works" draw: one setting at a time, on the embedded network.

    python benchmarks/choose.py horizon samples effort run

Each section is a file in benchmarks/results. scripts/draw_docs.py draws them. Test images judge; they decide nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accuracy import environment
from torch import Tensor, nn

import snows
from snows.data import embedded

RESULTS = Path(__file__).parent / "results"
PATTERN = "1:4"
PICTURE = "layer2.0.conv2"

Row = dict[str, Any]


def data() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    x, _, test, labels = embedded.images()
    return embedded.model(), x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))], test, labels


def measured(samples: int, **options: Any) -> tuple[Row, snows.Result]:
    model, x, test, labels = data()
    result = snows.prune(model, x[:samples], PATTERN, progress=False, **options)
    found = snows.evaluate(result.model, test, labels, dense=model)
    figures = {name: round(found[name], 4) for name in ("top1", "kl")}
    return {"samples": samples, **figures}, result


def horizon() -> Iterator[Row]:
    for steps in (0, 1, 2, 4, 8, 16):
        yield {"horizon": steps, **measured(500, effort="fast", horizon=steps)[0]}


def samples() -> Iterator[Row]:
    for count in (32, 64, 128, 256, 512, 1024, 2048):
        for name, options in {"K=0": {"horizon": 0}, "default": {}}.items():
            yield {"horizon": name, **measured(count, effort="fast", **options)[0]}


def effort() -> Iterator[Row]:
    """CPU time, which holds on a busy machine, too. "best" is "default" for images as small as these."""
    for name, options in {
        "K=0, one sweep": {"recipe": snows.Recipe(sweeps=1), "horizon": 0},
        "fast": {"effort": "fast"},
        "default": {},
    }.items():
        start = time.process_time()
        yield {"effort": name, **measured(500, **options)[0], "cpu_seconds": round(time.process_time() - start, 1)}


def run() -> Iterator[Row]:
    """One run, layer by layer: losses, errors along the network, and one layer's weights."""
    model, _, test, _ = data()
    _, masked = measured(1000, solver=None)
    _, layerwise = measured(1000, effort="fast", horizon=0)
    _, result = measured(1000, effort="fast")
    stages = {"mask only": masked, "K=0": layerwise, "SNOWS": result}
    reference = outputs(model, test[:500])
    for name, stage in stages.items():
        for layer, values in outputs(stage.model, test[:500]).items():
            dense = reference[layer]
            yield {"stage": name, "layer": layer, "error": round(float((values - dense).var() / dense.var()), 5)}
    for layer in result.report.layers:
        for sweep, solve in enumerate(layer.solves):
            yield {"layer": layer.name, "sweep": sweep, "masked": solve.loss_masked, "loss": solve.loss}
    for name, module in {"dense": model, "mask only": masked.model, "SNOWS": result.model}.items():
        weight = module.get_parameter(f"{PICTURE}.weight")[:16, :16, 1, 1]
        yield {"weights": name, "layer": PICTURE, "values": [[round(float(v), 4) for v in row] for row in weight]}


def outputs(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What each convolution and the classifier give, in the order of execution."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda module, args, output: found.__setitem__(name, output.detach())

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    hooks = [module.register_forward_hook(keep(name)) for name, module in layers]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return found


SECTIONS = {"horizon": horizon, "samples": samples, "effort": effort, "run": run}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    for name in parser.parse_args().sections:
        rows = []
        for row in SECTIONS[name]():
            rows.append(row)
            print({key: value for key, value in row.items() if key != "values"}, flush=True)
        result = {"network": embedded.MODEL, "pattern": PATTERN, "rows": rows, "environment": environment("cpu")}
        (RESULTS / f"choose-{name}.json").write_text(json.dumps(result, indent=None if name == "run" else 2) + "\n")


if __name__ == "__main__":
    main()
