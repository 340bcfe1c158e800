"""Mask sources side by side, on trained networks.

    python benchmarks/masks.py published      # ResNet20, unstructured, without SNOWS: the field's own comparison
    python benchmarks/masks.py unstructured   # ResNet20, magnitude masks with SNOWS, 1,000 and 3,000 images
    python benchmarks/masks.py resnet50       # ImageNet, OBC masks without and with SNOWS

One JSON file each under benchmarks/results, written again after every run. The comparison of N:M masks on ResNet20 is a
command of its own:

    snows compare benchmarks/networks.py:resnet20 --weights ../shared/checkpoints/resnet20_cifar10.safetensors
        --data benchmarks/networks.py:cifar10 --pattern 1:4,2:4 --mask magnitude,sparsegpt,obc --samples 3000
        --exclude '*downsample*' --out benchmarks/results/compare-resnet20

Test images decide nothing: options of the methods were chosen on calibration data alone.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accuracy import DATA, HERE, correct, environment, paired_drop, percent
from networks import load_network, normalization
from torch import Tensor

import snows
from snows.budgets import spread_out
from snows.data import read_npz
from snows.masks import NetworkMethod, as_method
from snows.memory import memory_limits
from snows.network import CalibratedNetwork
from snows.patterns import PatternRules
from snows.plan import make_plan
from snows.preparation import prepare, with_weights

SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9)
METHODS = ("magnitude", "woodfisher", "cbs", "chita", "falcon", "cap")


class Network:
    """A trained network with its data."""

    def __init__(self, name: str, shared: Path, device: str) -> None:
        mean, std = normalization(name)
        calibration, tests = DATA[name]
        self.x, self.y = read_npz(shared / "data" / calibration, mean, std)
        parts = [read_npz(shared / "data" / file, mean, std) for file in tests]
        self.test, self.labels = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts if y is not None])
        self.model = load_network(name, shared).to(device)
        self.dense = correct(self.model, self.test, self.labels)

    def outcome(self, model: torch.nn.Module) -> Tensor:
        return correct(model, self.test, self.labels)


def published(shared: Path, device: str, samples: int, seeds: int) -> Iterator[dict[str, Any]]:
    """All convolutions and the classifier; labels given; statistics and gradients shared by all methods of a seed."""
    network = Network("resnet20", shared, device)
    assert network.y is not None
    rows: dict[str, dict[str, list[float]]] = {method: {str(s): [] for s in SPARSITIES} for method in METHODS}
    for seed in range(seeds):
        batches = [(network.x[:samples], network.y[:samples])]
        world = prepare(network.model, batches, device, seed, with_labels=True)
        plan = make_plan(world.graph, PatternRules.parse(0.5), 0, layers="*")
        keep = memory_limits(world.device).targets
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


def unstructured(shared: Path, device: str, samples: int, seeds: int) -> Iterator[dict[str, Any]]:
    """SNOWS on magnitude masks; shortcuts, first layer and classifier dense, as in the paper."""
    network = Network("resnet20", shared, device)
    rows = []
    for count in (min(1000, samples), samples):
        for sparsity in SPARSITIES:
            for seed in range(seeds):
                row, _ = _prune(network, sparsity, count, seed, mask="magnitude", solver="newton")
                rows.append(row)
                yield _result("unstructured", network, rows, device)


def resnet50(shared: Path, device: str, samples: int, seeds: int) -> Iterator[dict[str, Any]]:
    """OBC masks, without SNOWS and (the same masks) with it."""
    network = Network("resnet50", shared, device)
    rows = []
    for pattern in ("1:4", "2:4"):
        row, found = _prune(network, pattern, samples, 0, mask="obc", solver=None)
        rows.append(row)
        yield _result("resnet50", network, rows, device)
        row, _ = _prune(network, pattern, samples, 0, mask=found.masks, solver="newton")
        rows.append({**row, "mask": "obc", "pattern": pattern})
        yield _result("resnet50", network, rows, device)


def _prune(network: Network, pattern: Any, count: int, seed: int, **options: Any) -> tuple[dict[str, Any], Any]:
    result = snows.prune(
        network.model, network.x[:count], pattern if isinstance(options["mask"], str) else None,
        exclude="*downsample*", seed=seed, progress=False, **options,
    )  # fmt: skip
    outcome = network.outcome(result.model)
    drop, half_width = paired_drop(network.dense, outcome[None])
    row = {
        "mask": options["mask"] if isinstance(options["mask"], str) else "given", "pattern": str(pattern),
        "snows": options["solver"] is not None, "samples": count, "seed": seed, "accuracy": percent(outcome),
        "drop": drop, "drop_interval": half_width, "sparsity": result.report.sparsity,
        "seconds": round(result.report.seconds, 1), "peak_memory_bytes": result.report.peak_memory_bytes,
    }  # fmt: skip
    print(" ", json.dumps(row), flush=True)
    return row, result


def _result(what: str, network: Network, rows: list[dict[str, Any]], device: str) -> dict[str, Any]:
    return {"what": what, "dense": percent(network.dense), "rows": rows, "environment": environment(device)}


CASES: dict[str, tuple[Callable[..., Iterator[dict[str, Any]]], int, int]] = {  # samples, seeds
    "published": (published, 3000, 3),
    "unstructured": (unstructured, 3000, 1),
    "resnet50": (resnet50, 1000, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with data/ and checkpoints/")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, help="instead of the case's own")
    parser.add_argument("--seeds", type=int, help="instead of the case's own")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore", snows.SnowsWarning)
    case, samples, seeds = CASES[options.case]
    path = options.out / f"masks-{options.case}.json"
    for result in case(options.shared, options.device, options.samples or samples, options.seeds or seeds):
        path.write_text(json.dumps(result, indent=2) + "\n")  # after every run: what is done is kept


if __name__ == "__main__":
    main()
