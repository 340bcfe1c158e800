"""How fast, and within how much memory. Every figure of one section comes from one run on one machine.

    python benchmarks/speed.py runs       # whole networks, end to end
    python benchmarks/speed.py paper      # against the paper's algorithm as published, to the same K-step loss
    python benchmarks/speed.py product    # one curvature product against its floor
    python benchmarks/speed.py profile    # whole networks once more, by what the time goes to
    python benchmarks/speed.py growth     # a layer's time against samples and horizon: a constant and a slope
    python benchmarks/speed.py memory     # peak memory against samples, each in a fresh process
    python benchmarks/speed.py authors --checkout DIR --command "python …"   # the authors' own code

One JSON file a section under benchmarks/results; rows that it has are not measured again (remove the file to do so).
`paper` runs `recipe="paper"` on single layers: its start, targets, normalization, and CG, on double-backward products.
Ours solves the very same loss, with the least effort of some that ends no higher. Both are warmed up first; medians of
three, single runs above ten seconds. Absolute times mean something on a quiet GPU only.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import shlex
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accuracy import DATA, correct, percent
from networks import load_network, normalization
from sections import Row, Section, make_parser, measure_rows
from tables import growth_table
from torch import Tensor, nn

import snows
from snows.data.preparation import prepare
from snows.data.sources import read_npz
from snows.data.streams import Stream, cut
from snows.patterns import PatternRules
from snows.plan import make_plan
from snows.recipe import DEFAULT, PAPER, Recipe
from snows.solve.layer import curvature_kind, derivative_precision, solve_layer
from snows.solve.problem import LayerProblem
from snows.solve.settings import Settings, resolve

LAYERS = {  # early, middle, late
    "resnet20": ("layer1.0.conv2", "layer2.1.conv1", "layer3.2.conv1"),
    "resnet50": ("layer1.1.conv2", "layer3.2.conv2", "layer4.1.conv2"),
}
# Newton steps and CG steps in each: how much ours may do to reach a loss, least first.
EFFORTS = ((1, 1), (1, 3), (1, 5), (1, 8), (2, 5), (1, 20), (1, 30), (1, 45), (1, 60), (2, 45), (1, 120), (4, 60))
LONG = 10.0  # seconds; what takes longer is measured once, all else three times

# What is timed; the last stage, which follows on large images, takes a fixed number of steps.
CASCADE = DEFAULT.replace(finish_steps=0)


@dataclass(frozen=True)
class Run:
    network: str
    pattern: str
    horizon: int
    samples: int
    memory: str | None = None
    repeats: int = 1


RUNS = (
    Run("resnet20", "1:4", 40, 3000, repeats=3),
    Run("resnet20", "2:4", 40, 3000, repeats=3),
    Run("resnet50", "1:4", 30, 3000, memory="40GiB"),
    Run("resnet50", "1:4", 30, 3000, memory="24GiB"),
    Run("resnet50", "1:4", 1000, 250, memory="24GiB"),  # to the network's end
)


def main() -> None:
    parser = make_parser(__doc__, SECTIONS)
    parser.add_argument("--networks", nargs="*", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument("--checkout", type=Path, help="of `authors`: folder with their code")
    parser.add_argument("--command", help="of `authors`: what to run in that folder, and to time")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # of `memory`: what the fresh process measures
    options = parser.parse_args()
    warnings.simplefilter("ignore", snows.SnowsWarning)
    if options.one is not None:
        print(json.dumps(_peak(Bench(options), json.loads(options.one))))
        return
    path = options.out / f"speed-{options.section}.json"
    rows = measure_rows(SECTIONS[options.section](Bench(options)), path, options.device)
    if options.section == "growth":
        print(growth_table(rows))


class Bench:
    """Networks and samples, read when they are asked for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.shared, self.device, self.networks = options.shared, options.device, options.networks
        self.most = options.samples
        self.checkout, self.command = options.checkout, options.command
        self._models: dict[str, nn.Module] = {}

    def model(self, name: str) -> nn.Module:
        if name not in self._models:
            self._models[name] = load_network(name, self.shared).to(self.device)
        return self._models[name]

    def count(self, samples: int) -> int:
        return min(samples, self.most or samples)

    def samples(self, name: str, count: int) -> Tensor:
        """Where there are fewer images than that, crops of them: each moved by some pixels, with mirrored borders."""
        x = read_npz(self.shared / "data" / DATA[name][0], *normalization(name))[0]
        generator = torch.Generator().manual_seed(0)
        parts = [x]
        while sum(len(part) for part in parts) < count:
            shift = torch.randint(-16, 17, (2,), generator=generator).tolist()
            padded = nn.functional.pad(x, [16, 16, 16, 16], mode="reflect")
            parts.append(padded[:, :, 16 + shift[0] :, 16 + shift[1] :][:, :, : x.shape[2], : x.shape[3]])
        return torch.cat(parts)[:count]

    def accuracy(self, name: str, model: nn.Module) -> float:
        files = [read_npz(self.shared / "data" / file, *normalization(name)) for file in DATA[name][1]]
        labels = torch.cat([y for _, y in files if y is not None])
        return percent(correct(model, torch.cat([x for x, _ in files]), labels))

    def prune(self, name: str, x: Tensor, pattern: str, recipe: Recipe, **options: Any) -> snows.Result:
        return snows.prune(
            self.model(name), x, pattern, exclude="*downsample*", recipe=recipe, progress=False, **options
        )


def runs(bench: Bench) -> Section:
    for run in RUNS:
        if run.network not in bench.networks:
            continue
        what = {
            "network": run.network, "pattern": run.pattern, "horizon": run.horizon, "memory": run.memory,
            "samples": bench.count(run.samples),
        }  # fmt: skip

        def measure(run: Run = run) -> Row:
            x = bench.samples(run.network, bench.count(run.samples))
            bench.model(run.network)
            seconds = []
            for _ in range(run.repeats):
                began = time.perf_counter()
                result = bench.prune(
                    run.network, x, run.pattern, CASCADE.replace(horizon=run.horizon), memory=run.memory
                )
                seconds.append(round(time.perf_counter() - began, 2))
            return {
                "seconds": statistics.median(seconds), "all_seconds": seconds,
                "peak_memory_bytes": result.report.peak_memory_bytes,
                "expected_memory_bytes": result.report.expected_memory_bytes,
                "accuracy": bench.accuracy(run.network, result.model),
                "cg_steps": {layer.name: [s.cg_steps for s in layer.solves] for layer in result.report.layers},
            }  # fmt: skip

        yield what, measure


def paper(bench: Bench) -> Section:
    for name in bench.networks:
        horizon, samples = (40, bench.count(1000)) if name == "resnet20" else (30, bench.count(512))
        for layer in LAYERS[name]:

            def measure(name: str = name, layer: str = layer, horizon: int = horizon, samples: int = samples) -> Row:
                x = bench.samples(name, samples)
                as_published = PAPER.replace(horizon=horizon, curvature="hessian")
                theirs, loss = _timed(bench, name, x, layer, as_published, repeats=3)
                same = CASCADE.replace(
                    horizon=horizon, targets=PAPER.targets, normalization=PAPER.normalization, sweeps=1, held_out=0.0,
                    cg_least_gain=0.0, cg_relative_tolerance=0.0,  # the effort says when to end
                )  # fmt: skip
                for steps, cg_steps in EFFORTS:  # as much as it takes
                    recipe = same.replace(newton_steps=steps, cg_steps=cg_steps)
                    _, reached = _timed(bench, name, x, layer, recipe)
                    if reached <= loss:
                        break
                ours, reached = _timed(bench, name, x, layer, recipe, repeats=3)
                return {
                    "seconds_paper": theirs, "seconds": ours, "ratio": round(theirs / ours, 1), "loss_paper": loss,
                    "loss": reached, "newton_steps": steps, "cg_steps": cg_steps, "reached": reached <= loss,
                }  # fmt: skip

            yield {"network": name, "layer": layer, "horizon": horizon, "samples": samples}, measure


def _timed(bench: Bench, name: str, x: Tensor, layer: str, recipe: Recipe, repeats: int = 0) -> tuple[float, float]:
    """Seconds of the layer's solve alone (without capture and the way to the layer, which are the same whatever the
    recipe), and the K-step loss it ended at."""
    if repeats:  # libraries load and choose their kernels at the first call
        bench.prune(name, x, "1:4", recipe.replace(cg_steps=1), layers=layer)
    seconds: list[float] = []
    while len(seconds) < max(repeats, 1) and not (seconds and seconds[0] > LONG):
        taken = {"solve": 0.0}
        timed = _added_to(taken, "solve", solve_layer, bench.device)
        with mock.patch("snows.solve.cascade.solve_layer", timed):
            (solve,) = bench.prune(name, x, "1:4", recipe, layers=layer).report.layers[0].solves
        seconds.append(taken["solve"])
    return round(statistics.median(seconds), 4), solve.loss


def product(bench: Bench) -> Section:
    """The floor of J^T J v is two plain passes over the segment, one forth and one back."""
    for name in bench.networks:
        horizon, samples = (16, bench.count(1000)) if name == "resnet20" else (4, bench.count(200))
        for layer in LAYERS[name]:

            def measure(name: str = name, layer: str = layer, horizon: int = horizon, samples: int = samples) -> Row:
                problem = _problem(bench, name, layer, horizon, samples)
                weight = problem.dense.parameters[problem.layers[0].parameter]
                settings = _settings(bench, name)
                precision = derivative_precision(settings.curvature, problem.segment, weight.device, weight.dtype)
                objective, piece = problem.objective("variance", precision), problem[0]
                with torch.no_grad():
                    forward = _seconds(lambda: piece.forward(weight), bench.device)
                once = objective.product(curvature_kind(settings.curvature, problem.segment), weight, keep=True)
                seconds = _seconds(lambda: once(weight), bench.device)
                flops = 2 * problem.segment.cost.flops * samples
                return {
                    "seconds": seconds, "forward_seconds": forward, "ratio_to_floor": round(seconds / (2 * forward), 2),
                    "teraflops": round(flops / seconds / 1e12, 2),
                }  # fmt: skip

            yield {"network": name, "layer": layer, "horizon": horizon, "samples": samples}, measure


def _problem(bench: Bench, name: str, layer: str, horizon: int, samples: int) -> LayerProblem:
    world = prepare(bench.model(name), bench.samples(name, samples), bench.device, 0)
    plan = make_plan(world.graph, PatternRules.parse("1:4"), horizon, layers=layer)
    batches = cut(*world.samples.split(samples), [node.name for node in world.graph.inputs], samples)
    streams = [Stream(world.graph, world.graph.parameters, batches) for _ in range(2)]
    for stream in streams:
        stream.advance(plan.pruned[0].layer.position)
    segment = world.graph.segment([plan.pruned[0].layer], plan.pruned[0].horizon)
    return LayerProblem(segment, streams[0], streams[1], "dense-stream", 1 << 40)


def _settings(bench: Bench, name: str) -> Settings:
    graph = prepare(bench.model(name), bench.samples(name, 2), bench.device, 0).graph
    return resolve(DEFAULT, graph, torch.device(bench.device).type)


def _seconds(work: Callable[[], object], device: str, repeats: int = 10) -> float:
    """The median of some calls, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


PROFILED: dict[str, tuple[str, ...]] = {  # none is called by another
    "capture, samples to the device": ("snows.run.prepare",),
    "streams, the dense network's outputs": ("snows.data.streams.Stream.advance", "snows.graph.Graph.outputs_of"),
    "second moments": ("snows.solve.problem.LayerProblem.moments", "snows.solve.problem.LayerProblem.gram"),
    "closed form and its factors": ("snows.solve.layer.row_systems", "snows.solve.least_squares.RowSystems.refit"),
    "losses": ("snows.solve.objective.Objective.loss",),
    "gradients": ("snows.solve.objective.Objective.loss_and_gradient",),
    "Jacobians": ("snows.solve.objective.Objective.product",),
    "CG with its products": ("snows.solve.newton.conjugate_gradient",),
}


def profile(bench: Bench) -> Section:
    """Of the second of two runs; before and after each part the device is waited for."""
    for name in bench.networks:
        horizon, samples = (40, bench.count(3000)) if name == "resnet20" else (4, bench.count(1000))

        def measure(name: str = name, horizon: int = horizon, samples: int = samples) -> Row:
            x, recipe = bench.samples(name, samples), CASCADE.replace(horizon=horizon)
            bench.prune(name, x, "1:4", recipe)
            seconds = dict.fromkeys(PROFILED, 0.0)
            with ExitStack() as patches:
                for part, places in PROFILED.items():
                    for place in places:
                        timed = _added_to(seconds, part, pkgutil.resolve_name(place), bench.device)
                        patches.enter_context(mock.patch(place, timed))
                began = time.perf_counter()
                bench.prune(name, x, "1:4", recipe)
                total = time.perf_counter() - began
            seconds["all else"] = total - sum(seconds.values())
            return {"seconds": round(total, 2), "parts": {part: round(value, 3) for part, value in seconds.items()}}

        yield {"network": name, "horizon": horizon, "samples": samples}, measure


def _added_to(seconds: dict[str, float], part: str, work: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The same function, whose time is added to a part's."""

    def timed(*arguments: Any, **options: Any) -> Any:
        _wait(device)
        began = time.perf_counter()
        result = work(*arguments, **options)
        _wait(device)
        seconds[part] += time.perf_counter() - began
        return result

    return timed


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def growth(bench: Bench) -> Section:
    """Of single layers, with as many CG steps in each; after one solve to warm up."""
    for name in bench.networks:
        most = bench.count(3000 if name == "resnet20" else 800)
        for samples, horizon in ((most, 2), (most, 8), (most, 32), (most // 2, 32), (most // 4, 32), (most // 4, 8)):
            for layer in LAYERS[name]:

                def measure(
                    name: str = name, samples: int = samples, layer: str = layer, horizon: int = horizon
                ) -> Row:
                    recipe = CASCADE.replace(
                        horizon=horizon, sweeps=1, cg_steps=8, cg_relative_tolerance=0.0, cg_least_gain=0.0,
                        product_samples=None, held_out=0.0,
                    )  # fmt: skip
                    x = bench.samples(name, samples)
                    seconds, _ = _timed(bench, name, x, layer, recipe, repeats=1)
                    world = prepare(bench.model(name), x[:2], bench.device, 0)
                    planned = make_plan(world.graph, PatternRules.parse("1:4"), horizon, layers=layer).pruned[0]
                    flops = world.graph.cost([planned.layer], planned.horizon).flops
                    return {"seconds": seconds, "flops": flops * samples}

                yield {"network": name, "layer": layer, "horizon": horizon, "samples": samples}, measure


def memory(bench: Bench) -> Section:
    """With so little memory that activations rest on the host; on the small network also with all that is free."""
    cells = {"resnet20": ((None, "512MiB"), (1250, 2500, 5000)), "resnet50": (("8GiB",), (500, 1000, 2000))}
    for name in bench.networks:
        budgets, counts = cells[name]
        for budget in budgets:
            for samples in counts:
                what = {"network": name, "memory": budget, "samples": bench.count(samples)}
                yield what, lambda what=what: _in_fresh_process(bench, what)  # type: ignore[misc]


def _in_fresh_process(bench: Bench, what: Row) -> Row:
    command = [sys.executable, __file__, "memory", "--shared", str(bench.shared), "--device", bench.device]
    done = subprocess.run([*command, "--one", json.dumps(what)], capture_output=True, text=True, check=True)
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def _peak(bench: Bench, what: Row) -> Row:
    import resource

    x = bench.samples(what["network"], what["samples"])
    recipe = CASCADE.replace(sweeps=1, cg_steps=2)
    result = bench.prune(what["network"], x, "1:4", recipe, memory=what["memory"])
    return {
        "peak_memory_bytes": result.report.peak_memory_bytes,
        "expected_memory_bytes": result.report.expected_memory_bytes,
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "seconds": round(result.report.seconds, 1),
    }


def authors(bench: Bench) -> Section:
    """Wall-clock time of another program, from its start to its end."""
    if bench.checkout is None or not bench.command:
        sys.exit("authors: expected --checkout DIR and --command 'what to run there'")
    arguments = shlex.split(bench.command)

    def measure() -> Row:
        began = time.perf_counter()
        done = subprocess.run(arguments, cwd=bench.checkout)
        return {"seconds": round(time.perf_counter() - began, 2), "exit_status": done.returncode}

    yield {"command": bench.command}, measure


SECTIONS: dict[str, Callable[[Bench], Section]] = {
    "runs": runs, "paper": paper, "product": product, "profile": profile, "growth": growth, "memory": memory,
    "authors": authors,
}  # fmt: skip


if __name__ == "__main__":
    main()
