"""What two CPU cores can do: `effort="fast"` on whole networks, and the closed form against its floor.

    python benchmarks/laptop.py effort                      # 128 images; accuracy on validation a
    python benchmarks/laptop.py floor --before ../v0.12     # ResNet50, 2:4, K=0, 64 images; another version beside it

The floor is what no layer-wise method can avoid: one pass of the images through the dense and one through the pruned
network, and the Gram matrices of all layers at the machine's own rate of matrix products. `--before` is a checkout of
another version; it is timed in the same run. Times are of a quiet machine or mean nothing; ratios say more.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from accuracy import correct, paired_drop, percent
from networks import load_network, normalization
from sections import Row, Section, make_parser, measure_rows
from torch import Tensor, nn

import snows
from snows.data.preparation import prepare
from snows.data.sources import read_npz
from snows.patterns import PatternRules
from snows.plan import make_plan
from snows.recipe import Effort

CASES = (("resnet50", "2:4"), ("mobilenet", "0.5"), ("vit", "2:4"))
IMAGES, FLOOR_IMAGES = 128, 64
ONCE = """
import sys, time, warnings
from pathlib import Path
import torch, snows
from networks import load_network
warnings.simplefilter("ignore")
model, images = load_network("resnet50", Path(sys.argv[1])), torch.load(sys.argv[2], weights_only=True)
with torch.no_grad():
    model(images[:8])
recipe = snows.Recipe(horizon=0, sweeps=1, finish_steps=0)
began = time.perf_counter()
snows.prune(model, images, "2:4", exclude="*downsample*", recipe=recipe, progress=False)
print(time.perf_counter() - began)
"""


def main() -> None:
    parser = make_parser(__doc__, ("effort", "floor"))
    parser.add_argument("--before", type=Path, help="floor: a checkout of another version")
    options = parser.parse_args()
    rows = efforts(options.shared) if options.section == "effort" else floor(options.shared, options.before)
    measure_rows(rows, options.out / f"laptop-{options.section}.json", "cpu")


def efforts(shared: Path) -> Section:
    for network, pattern in CASES:

        def measure(network: str = network, pattern: str = pattern) -> Row:
            model, images = load_network(network, shared), calibration(network, shared, IMAGES)
            rate, began = product_rate(), time.perf_counter()
            result = run(model, images, pattern, "fast")
            seconds = time.perf_counter() - began
            mean, std = normalization(network)
            test, labels = read_npz(shared / "data" / "imagenet_val_a.npz", mean, std)
            assert labels is not None
            dense, pruned = correct(model, test, labels), correct(result.model, test, labels)
            drop, interval = paired_drop(dense, pruned[None])
            return {
                "seconds": round(seconds, 1),
                "dense": percent(dense),
                "pruned": percent(pruned),
                "drop": drop,
                "drop_interval": interval,
                "gflops": rate,
            }

        yield {"network": network, "pattern": pattern, "effort": "fast", "images": IMAGES}, measure


def floor(shared: Path, before: Path | None) -> Section:
    here = Path(__file__).parent.parent
    what = {"network": "resnet50", "pattern": "2:4", "horizon": 0, "images": FLOOR_IMAGES}

    def of(source: Path) -> Callable[[], Row]:
        return lambda: {"seconds": in_own_process(source, shared), **floor_seconds(shared)}

    yield {**what, "version": snows.__version__}, of(here)
    if before is not None:
        namespace: dict[str, str] = {}
        exec((before / "src/snows/version.py").read_text(), namespace)
        yield {**what, "version": namespace["__version__"]}, of(before)


def in_own_process(source: Path, shared: Path) -> float:
    """The seconds of a run with the package and the networks of another source tree."""
    paths = [str((source / folder).resolve()) for folder in ("src", "benchmarks")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images.pt"
        torch.save(calibration("resnet50", shared, FLOOR_IMAGES), images)
        command = [sys.executable, "-c", ONCE, str(shared.resolve()), str(images)]
        answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return round(float(answer.stdout.split()[-1]), 1)


def floor_seconds(shared: Path) -> Row:
    """Two forward passes, and the Gram matrices at the rate of large products."""
    model, images = load_network("resnet50", shared), calibration("resnet50", shared, FLOOR_IMAGES)
    with torch.no_grad():
        model(images[:8])
        began = time.perf_counter()
        model(images)
        forward = time.perf_counter() - began
    graph = prepare(model, images[:4], None, 0, False).graph
    layers = [p.layer for p in make_plan(graph, PatternRules.parse("2:4"), 0, None, ("*downsample*",)).pruned]
    operations = sum(2.0 * layer.positions * FLOOR_IMAGES * layer.columns**2 * layer.groups for layer in layers)
    rate = product_rate()
    return {
        "floor_seconds": round(2 * forward + operations / rate / 1e9, 1),
        "forward_seconds": round(forward, 2),
        "gram_gflop": round(operations / 1e9),
        "gflops": rate,
    }


def product_rate() -> float:
    """GFLOP/s of a large product in float32: the best of five."""
    a = torch.randn(3000, 3000)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - began)
    return round(2 * 3000**3 / best / 1e9, 1)


def calibration(network: str, shared: Path, images: int) -> Tensor:
    mean, std = normalization(network)
    return read_npz(shared / "data" / "imagenet_calibration.npz", mean, std)[0][:images].clone()


def run(model: nn.Module, images: Tensor, pattern: str, effort: Effort) -> snows.Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return snows.prune(model, images, pattern, exclude="*downsample*", progress=False, effort=effort)


if __name__ == "__main__":
    main()
