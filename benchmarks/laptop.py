"""What two CPU cores can do: `effort="fast"` on whole networks, and the closed form against its floor.

    python benchmarks/laptop.py effort                      # 128 images; accuracy on validation a
    python benchmarks/laptop.py floor --before ../v0.12     # ResNet50, 2:4, K=0, 64 images; another version beside it
    python benchmarks/laptop.py profile                     # K=0, 128 images: layer by layer, and by what is done

The floor is what no layer-wise method can avoid: one pass of the images through the dense and one through the pruned
network, and the Gram matrices of all layers at the machine's own rate of matrix products. `--before` is a checkout of
another version; it is timed in the same run. `--networks` chooses some of the networks.

Seconds are of a quiet machine or mean nothing. Beside them are the seconds of the processor that the run itself took:
these hold on a busy machine, too, with OMP_NUM_THREADS=1 (several threads wait for each other, which counts).
"""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accuracy import correct, paired_drop, percent
from networks import NETWORKS, load_network, normalization
from sections import Row, Section, make_parser, measure_rows
from torch import Tensor, nn

import snows
from snows.data.preparation import prepare
from snows.data.sources import read_npz
from snows.events import Event, LayerSolved, LayerStarted
from snows.patterns import PatternRules
from snows.plan import make_plan
from snows.recipe import Recipe

CASES = {"resnet50": "2:4", "mobilenet": "0.5", "vit": "2:4", "resnet18": "2:4"}
IMAGES, FLOOR_IMAGES = 128, 64
CLOSED_FORM = Recipe(horizon=0, sweeps=1, finish_steps=0)
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
began, processor = time.perf_counter(), time.process_time()
snows.prune(model, images, "2:4", exclude="*downsample*", recipe=recipe, progress=False)
print(time.perf_counter() - began, time.process_time() - processor)
"""
PARTS: dict[str, tuple[str, ...]] = {  # what is called within a part belongs to its own part, if it has one
    "capture": ("snows.run.prepare",),
    "forward passes": ("snows.data.streams.Stream.advance", "snows.graph.Graph.outputs_of"),
    "second moments": ("snows.solve.problem.LayerProblem.moments", "snows.solve.problem.LayerProblem.gram"),
    "factors": ("snows.solve.layer.row_systems",),
    "steps": ("snows.solve.least_squares.RowSystems.refit",),
    "losses": ("snows.solve.objective.Objective.loss", "snows.solve.objective.Objective.loss_and_gradient"),
    "variances": ("snows.solve.problem.LayerProblem._variances",),
    "Newton-CG": ("snows.solve.layer.newton",),
}


def main() -> None:
    parser = make_parser(__doc__, ("effort", "floor", "profile"))
    parser.add_argument("--before", type=Path, help="floor: a checkout of another version")
    parser.add_argument("--networks", nargs="*", choices=list(CASES), default=list(CASES), help="effort, profile")
    options = parser.parse_args()
    sections = {
        "effort": lambda: efforts(options.shared, options.networks),
        "floor": lambda: floor(options.shared, options.before),
        "profile": lambda: profile(options.shared, options.networks),
    }
    warnings.simplefilter("ignore")
    measure_rows(sections[options.section](), options.out / f"laptop-{options.section}.json", "cpu")


class Clock:
    """Seconds, and seconds of the processor that this process took, from here on."""

    def __init__(self) -> None:
        self.began, self.processor = time.perf_counter(), time.process_time()

    def read(self, prefix: str = "") -> Row:
        seconds, processor = time.perf_counter() - self.began, time.process_time() - self.processor
        return {f"{prefix}seconds": round(seconds, 2), f"{prefix}cpu_seconds": round(processor, 2)}


def efforts(shared: Path, networks: list[str]) -> Section:
    for network in networks:

        def measure(network: str = network) -> Row:
            model, images = load(network, shared), calibration(network, shared, IMAGES)
            rate, clock = product_rate(), Clock()
            result = snows.prune(model, images, CASES[network], exclude="*downsample*", progress=False, effort="fast")
            found = {**clock.read(), **rate}
            return {**found, **accuracies(network, shared, model, result.model)} if network in NETWORKS else found

        yield {"network": network, "pattern": CASES[network], "effort": "fast", "images": IMAGES}, measure


def accuracies(network: str, shared: Path, dense: nn.Module, pruned: nn.Module) -> Row:
    mean, std = normalization(network)
    test, labels = read_npz(shared / "data" / "imagenet_val_a.npz", mean, std)
    assert labels is not None
    right, right_pruned = correct(dense, test, labels), correct(pruned, test, labels)
    drop, interval = paired_drop(right, right_pruned[None])
    return {"dense": percent(right), "pruned": percent(right_pruned), "drop": drop, "drop_interval": interval}


def floor(shared: Path, before: Path | None) -> Section:
    here = Path(__file__).parent.parent
    what = {"network": "resnet50", "pattern": "2:4", "horizon": 0, "images": FLOOR_IMAGES}

    def of(source: Path) -> Callable[[], Row]:
        return lambda: {**in_own_process(source, shared), **floor_seconds("resnet50", shared, FLOOR_IMAGES)}

    yield {**what, "version": snows.__version__}, of(here)
    if before is not None:
        namespace: dict[str, str] = {}
        exec((before / "src/snows/version.py").read_text(), namespace)
        yield {**what, "version": namespace["__version__"]}, of(before)


def in_own_process(source: Path, shared: Path) -> Row:
    """The seconds of a run with the package and the networks of another source tree."""
    paths = [str((source / folder).resolve()) for folder in ("src", "benchmarks")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images.pt"
        torch.save(calibration("resnet50", shared, FLOOR_IMAGES), images)
        command = [sys.executable, "-c", ONCE, str(shared.resolve()), str(images)]
        answer = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    seconds, processor = map(float, answer.stdout.split()[-2:])
    return {"seconds": round(seconds, 1), "cpu_seconds": round(processor, 1)}


def floor_seconds(network: str, shared: Path, count: int) -> Row:
    """Two forward passes, and the Gram matrices at the rate of large products."""
    model, images = load(network, shared), calibration(network, shared, count)
    with torch.no_grad():
        model(images[:8])
        clock = Clock()
        for part in images.split(32):
            model(part)
        forward = clock.read("forward_")
    gflop = sum(gram for gram, _ in layer_gflop(model, images, CASES[network]).values())
    rate = product_rate()
    return {
        "floor_seconds": round(2 * forward["forward_seconds"] + gflop / rate["gflops"], 1),
        "floor_cpu_seconds": round(2 * forward["forward_cpu_seconds"] + gflop / rate["gflops_of_a_cpu_second"], 1),
        **forward,
        "gram_gflop": round(gflop),
        **rate,
    }


def layer_gflop(model: nn.Module, images: Tensor, pattern: str) -> dict[str, tuple[float, float]]:
    """Of every pruned layer: operations of its Gram matrix, and of its two forward passes."""
    graph = prepare(model, images[:4], None, 0, False).graph
    layers = [p.layer for p in make_plan(graph, PatternRules.parse(pattern), 0, None, ("*downsample*",)).pruned]
    positions = {layer.name: 2e-9 * layer.positions * len(images) for layer in layers}
    return {
        layer.name: (
            positions[layer.name] * layer.columns**2 * layer.groups,
            positions[layer.name] * 2 * layer.shape.numel(),
        )
        for layer in layers
    }


def product_rate() -> Row:
    """GFLOP/s of a large product in float32: the best of five."""
    a = torch.randn(3000, 3000)
    clocks = []
    for _ in range(5):
        began, processor = time.perf_counter(), time.process_time()
        a @ a
        clocks.append((time.perf_counter() - began, time.process_time() - processor))
    seconds, processor = map(min, zip(*clocks, strict=True))
    gflop = 2 * 3000**3 / 1e9
    return {
        "gflops": round(gflop / seconds, 1),
        "gflops_of_a_cpu_second": round(gflop / processor, 1),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
    }


def profile(shared: Path, networks: list[str]) -> Section:
    for network in networks:

        def measure(network: str = network) -> Row:
            model, images = load(network, shared), calibration(network, shared, IMAGES)
            floors, parts, layers = layer_gflop(model, images, CASES[network]), Parts(), Layers()
            clock = Clock()
            with parts:
                snows.prune(model, images, CASES[network], exclude="*downsample*", recipe=CLOSED_FORM, progress=layers)
            found = {**clock.read(), **floor_seconds(network, shared, IMAGES)}
            rate = found["gflops_of_a_cpu_second"]
            least = {name: round(sum(floors[name]) / rate, 2) for name in layers.cpu_seconds}
            return {
                **found,
                "parts_cpu_seconds": parts.cpu_seconds,
                "layers_cpu_seconds": {
                    name: {"taken": taken, "floor": least[name]} for name, taken in layers.cpu_seconds.items()
                },
            }

        yield {"network": network, "pattern": CASES[network], "horizon": 0, "images": IMAGES}, measure


class Layers:
    """A listener: seconds of the processor for every layer, from its start to its acceptance."""

    def __init__(self) -> None:
        self.cpu_seconds: dict[str, float] = {}
        self._began = time.process_time()

    def __call__(self, event: Event) -> None:
        if isinstance(event, LayerSolved):
            self.cpu_seconds[event.layers[0]] = round(time.process_time() - self._began, 2)
        if isinstance(event, LayerStarted):
            self._began = time.process_time()


class Parts:
    """Within it, seconds of the processor are counted for each of `PARTS`."""

    def __init__(self) -> None:
        self._taken = dict.fromkeys([*PARTS, "all else"], 0.0)
        self._current, self._since, self._patches = "all else", 0.0, ExitStack()

    @property
    def cpu_seconds(self) -> dict[str, float]:
        return {part: round(taken, 2) for part, taken in self._taken.items()}

    def __enter__(self) -> None:
        for part, places in PARTS.items():
            for place in places:
                self._patches.enter_context(mock.patch(place, self._counted(part, pkgutil.resolve_name(place))))
        self._since = time.process_time()

    def __exit__(self, *_: object) -> None:
        self._switch("all else")
        self._patches.close()

    def _counted(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            outer = self._switch(part)
            try:
                return work(*arguments, **options)
            finally:
                self._switch(outer)

        return call

    def _switch(self, part: str) -> str:
        now, outer = time.process_time(), self._current
        self._taken[outer] += now - self._since
        self._current, self._since = part, now
        return outer


def load(network: str, shared: Path) -> nn.Module:
    """A trained network; torchvision's ResNet18 with random weights, of which only the time says something."""
    if network in NETWORKS:
        return load_network(network, shared)
    models = pkgutil.resolve_name("torchvision.models")
    torch.manual_seed(0)
    made: nn.Module = getattr(models, network)().eval()
    return made


def calibration(network: str, shared: Path, images: int) -> Tensor:
    mean, std = normalization(network if network in NETWORKS else "resnet50")
    return read_npz(shared / "data" / "imagenet_calibration.npz", mean, std)[0][:images].clone()


if __name__ == "__main__":
    main()
