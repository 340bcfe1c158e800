"""Mask sources side by side, on trained networks.

    python benchmarks/masks.py published      # ResNet20, unstructured, without SNOWS: the field's own comparison
    python benchmarks/masks.py unstructured   # ResNet20, magnitude masks with SNOWS, 1,000 and 3,000 images
    python benchmarks/masks.py resnet50       # ImageNet, masks without and with SNOWS

One JSON file each under benchmarks/results, written again after every run; runs that it has are not done again (remove
the file to do so). The comparison of N:M masks on ResNet20 is a
command of its own:

    snows compare benchmarks/networks.py:resnet20 --weights ../shared/checkpoints/resnet20_cifar10.safetensors
        --data benchmarks/networks.py:cifar10 --pattern 1:4,2:4 --mask magnitude,sparsegpt,obc,exchange --samples 3000
        --exclude '*downsample*' --out benchmarks/results/compare-resnet20

Test images decide nothing: options of the methods were chosen on calibration data alone.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accuracy import DATA, correct, environment, paired_drop, percent
from networks import load_network, normalization
from sections import make_parser
from torch import Tensor

import snows
from snows.data.preparation import prepare, with_weights
from snows.data.sources import read_npz
from snows.devices.memory import memory_limits
from snows.evaluation.classes import reference
from snows.masks import NetworkMethod, as_method
from snows.masks.statistics import CalibratedNetwork
from snows.patterns import PatternRules
from snows.patterns.budgets import spread_out
from snows.plan import make_plan
from snows.recipe import DEFAULT, PAPER

SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9)
METHODS = ("magnitude", "woodfisher", "cbs", "chita", "falcon", "cap")
RECIPES = {  # how far SNOWS goes
    "no": None,  # the mask's own weights stay
    "paper": PAPER.replace(precision="auto"),  # the paper's algorithm, its products in bfloat16 on a GPU
    "cascade": DEFAULT.replace(finish_steps=0),  # without the last stage
    "yes": DEFAULT,
}


class Network:
    """A trained network with its data."""

    def __init__(self, name: str, shared: Path, device: str) -> None:
        mean, std = normalization(name)
        calibration, tests = DATA[name]
        self.x, self.y = read_npz(shared / "data" / calibration, mean, std)
        parts = [read_npz(shared / "data" / file, mean, std) for file in tests]
        self.test, self.labels = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts if y is not None])
        self.model = load_network(name, shared).to(device)
        self.scores = reference(self.model, self.test)
        self.dense = self.outcome(self.model)

    def outcome(self, model: torch.nn.Module) -> Tensor:
        return correct(model, self.test, self.labels)


def published(
    shared: Path, device: str, samples: int, seeds: int, done: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """All convolutions and the classifier; labels given; statistics and gradients shared by all methods of a seed."""
    network = Network("resnet20", shared, device)
    assert network.y is not None
    rows: dict[str, dict[str, list[float]]] = {method: {str(s): [] for s in SPARSITIES} for method in METHODS}
    for seed in range(seeds):
        batches = [(network.x[:samples], network.y[:samples])]
        world = prepare(network.model, batches, device, seed, with_labels=True)
        plan = make_plan(world.graph, PatternRules.parse(0.5), 0, layers="*")
        keep = memory_limits(world.device).held
        asked = CalibratedNetwork(world.graph, world.samples, plan.patterns, seed, world.samples.labels, keep)
        for sparsity in SPARSITIES:
            rules = PatternRules.parse(sparsity)
            patterns = make_plan(world.graph, rules, 0, layers="*").patterns
            asked.patterns = spread_out(patterns, asked, "global", ranks_together=True)
            for name in METHODS:
                method = as_method(name)
                assert isinstance(method, NetworkMethod)
                began = time.perf_counter()
                choice = method.choose(asked)
                seconds = time.perf_counter() - began
                weights = {n: choice.weights.get(n, asked.weights[n]) * mask for n, mask in choice.masks.items()}
                accuracy = percent(network.outcome(with_weights(network.model, weights)))
                rows[name][str(sparsity)].append(accuracy)
                print(f"  seed {seed} {name} {sparsity}: {accuracy} ({seconds:.1f} s)", flush=True)
        yield {
            "what": "published", "dense": percent(network.dense), "samples": samples, "seeds": seed + 1, "rows": rows,
            "environment": environment(device),
        }  # fmt: skip


def unstructured(
    shared: Path, device: str, samples: int, seeds: int, done: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """SNOWS on magnitude masks; shortcuts, first layer and classifier dense, as in the paper."""
    always = {"mask": "magnitude", "permuted": False, "snows": "yes"}
    runs = [
        {**always, "pattern": str(sparsity), "samples": count, "seed": seed}
        for count in (min(1000, samples), samples)
        for sparsity in SPARSITIES
        for seed in range(seeds)
    ]
    yield from _table("unstructured", Network("resnet20", shared, device), runs, done, device)


def resnet50(
    shared: Path, device: str, samples: int, seeds: int, done: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Layer methods choose each mask when the layers before it are pruned, and with SNOWS re-adjusted, too.

    Those that are compared in the end take `seeds` orders of the samples, the others one.
    """
    wanted = [  # whether channels are permuted, how far SNOWS goes, and in how many orders
        ("magnitude", "1:4", False, "yes", seeds), ("obc+exchange", "1:4", True, "yes", seeds),
        ("magnitude", "1:4", True, "yes", 1), ("obc", "1:4", True, "yes", 1), ("exchange", "1:4", True, "yes", 1),
        ("obc", "1:4", False, "yes", 1), ("magnitude", "1:4", False, "cascade", seeds),
        ("obc", "1:4", True, "cascade", seeds), ("obc+exchange", "1:4", True, "cascade", seeds),
        ("magnitude", "1:4", False, "paper", 1), ("obc", "1:4", False, "paper", 1),
        ("obc", "1:4", False, "no", 1), ("exchange", "1:4", False, "no", 1), ("obc", "2:4", False, "yes", 1),
        ("obc", "2:4", False, "no", 1),
    ]  # fmt: skip
    runs = [
        {"mask": mask, "pattern": pattern, "permuted": permuted, "snows": snows, "samples": samples, "seed": seed}
        for mask, pattern, permuted, snows, orders in wanted
        for seed in range(orders)
    ]
    yield from _table("resnet50", Network("resnet50", shared, device), runs, done, device)


def _table(
    what: str, network: Network, runs: list[dict[str, Any]], done: list[dict[str, Any]], device: str
) -> Iterator[dict[str, Any]]:
    """The result so far, after each run."""
    rows = []
    for run in runs:
        known = [row for row in done if all(row.get(key) == value for key, value in run.items())]
        rows.append(known[0] if known else _prune(network, run))
        others = [row for row in done if row not in rows]
        yield {
            "what": what, "dense": percent(network.dense), "rows": rows + others, "environment": environment(device)
        }  # fmt: skip


def _prune(network: Network, run: dict[str, Any]) -> dict[str, Any]:
    recipe = RECIPES[run["snows"]]
    result = snows.prune(
        network.model, network.x[: run["samples"]], run["pattern"], mask=run["mask"], exclude="*downsample*",
        recipe=recipe or DEFAULT, solver="newton" if recipe else None, seed=run["seed"], permute=run["permuted"],
        progress=False,
    )  # fmt: skip
    right = network.outcome(result.model)
    drop, half_width = paired_drop(network.dense, right[None])
    row = {
        **run, "accuracy": percent(right), "drop": drop, "drop_interval": half_width,
        "kl": round(snows.evaluate(result.model, network.test, dense=network.scores)["kl"], 4),
        "right": "".join(str(int(one)) for one in right),  # image by image: rows are compared in pairs
        "sparsity": result.report.sparsity, "seconds": round(result.report.seconds, 1),
        "peak_memory_bytes": result.report.peak_memory_bytes, "version": snows.__version__,
    }  # fmt: skip
    print(" ", json.dumps({**row, "right": len(right)}), flush=True)
    return row


CASES: dict[str, tuple[Callable[..., Iterator[dict[str, Any]]], int, int]] = {  # samples, seeds
    "published": (published, 3000, 3),
    "unstructured": (unstructured, 3000, 1),
    "resnet50": (resnet50, 1000, 3),
}


def main() -> None:
    parser = make_parser(__doc__, CASES)
    parser.add_argument("--seeds", type=int, help="instead of the case's own")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore", snows.SnowsWarning)
    case, samples, seeds = CASES[options.section]
    path = options.out / f"masks-{options.section}.json"
    done = json.loads(path.read_text())["rows"] if path.exists() else []
    for result in case(options.shared, options.device, options.samples or samples, options.seeds or seeds, done):
        path.write_text(json.dumps(result, indent=2) + "\n")  # after every run: what is done is kept


if __name__ == "__main__":
    main()
