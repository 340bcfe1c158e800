"""How much accuracy is lost: trained networks, magnitude masks, no labels, no retraining.

    python benchmarks/accuracy.py --shared ../shared --device cuda
    python benchmarks/accuracy.py --only resnet20-1of4 --seeds 0

One JSON file a case under benchmarks/results; a case whose file exists is not run again (remove the file to do so), so
a long run can be split. Shortcuts, the first layer and the classifier stay dense. A seed is an order of the calibration
samples. Test images decide nothing: recipes are chosen on calibration data alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from networks import load_network, normalization
from torch import Tensor, nn

import snows
from snows.data.sources import read_npz
from snows.evaluation.classes import predict
from snows.recipe import DEFAULT, PAPER, Recipe

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    network: str
    pattern: str
    samples: int
    recipe: str = "default"
    seeds: tuple[int, ...] = (0, 1, 2)


CASES = {
    "resnet20-2of4": Case("resnet20", "2:4", 3000),
    "resnet20-1of4": Case("resnet20", "1:4", 3000),
    "resnet50-2of4": Case("resnet50", "2:4", 1000),
    "resnet50-1of4": Case("resnet50", "1:4", 1000),
    "mobilenet-0.7": Case("mobilenet", "0.7", 1000),
    "resnet20-1of4-paper": Case("resnet20", "1:4", 1000, "paper", (0,)),
}
DATA = {  # calibration, test
    "resnet20": ("cifar10_train5k.npz", ["cifar10_test.npz"]),
    "resnet50": ("imagenet_calibration.npz", ["imagenet_val_a.npz", "imagenet_val_b.npz"]),
    "mobilenet": ("imagenet_calibration.npz", ["imagenet_val_a.npz", "imagenet_val_b.npz"]),
    "vit": ("imagenet_calibration.npz", ["imagenet_val_a.npz", "imagenet_val_b.npz"]),
}
RECIPES: dict[str, Recipe] = {"default": DEFAULT, "paper": PAPER}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with data/ and checkpoints/")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", nargs="*", type=int, help="instead of each case's own")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        path = options.out / f"accuracy-{name}.json"
        if path.exists():
            print(f"{name}: {path} exists")
            continue
        case = CASES[name]
        for result in run(case, options.shared, options.device, options.seeds or list(case.seeds)):
            path.write_text(json.dumps(result, indent=2) + "\n")  # after every seed: what is done is kept
        print(name, json.dumps(result["summary"]), flush=True)


def run(case: Case, shared: Path, device: str, seeds: list[int]) -> Iterator[dict[str, Any]]:
    """The result so far, after each seed."""
    mean, std = normalization(case.network)
    calibration_file, test_files = DATA[case.network]
    calibration = read_npz(shared / "data" / calibration_file, mean, std)[0][: case.samples]
    parts = [read_npz(shared / "data" / file, mean, std) for file in test_files]
    test, labels = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts if y is not None])
    model = load_network(case.network, shared).to(device)
    dense = correct(model, test, labels)
    runs: list[dict[str, Any]] = []
    outcomes: list[Tensor] = []
    for seed in seeds:
        outcome, facts = prune_once(case, model, calibration, test, labels, RECIPES[case.recipe], seed)
        outcomes.append(outcome)
        runs.append(facts)
        print(
            f"  {case.network} {case.pattern} seed {seed}: {facts['accuracy']:.2f} in {facts['seconds']} s", flush=True
        )
        if seed == seeds[0]:  # the baselines do not depend on the order of the samples
            light = DEFAULT.replace(sweeps=1, horizon=0, finish_steps=0)
            layerwise = prune_once(case, model, calibration, test, labels, light, seed)[1]["accuracy"]
            mask_only = prune_once(case, model, calibration, test, labels, None, seed)[1]["accuracy"]
        drop, half_width = paired_drop(dense, torch.stack(outcomes))
        yield {
            "case": {**case.__dict__, "seeds": [r["seed"] for r in runs]},
            "summary": {
                "dense": percent(dense),
                "mask_only": mask_only,
                "layerwise": layerwise,
                "snows": round(sum(r["accuracy"] for r in runs) / len(runs), 2),
                "drop": drop,
                "drop_interval": half_width,
                "seconds": sorted(r["seconds"] for r in runs)[len(runs) // 2],
                "peak_memory_gib": round(max(r["peak_memory_bytes"] or 0 for r in runs) / 2**30, 1),
                "test_images": len(labels),
            },
            "runs": runs,
            "recipe": json.loads(RECIPES[case.recipe].to_json()),
            "environment": environment(device),
        }


def prune_once(
    case: Case, model: nn.Module, calibration: Tensor, test: Tensor, labels: Tensor, recipe: Recipe | None, seed: int
) -> tuple[Tensor, dict[str, Any]]:
    """Which test images are right afterwards, and the facts of the run. Without a recipe: the mask alone."""
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", snows.SnowsWarning)  # not every network has shortcuts to exclude
        result = snows.prune(
            model, calibration, case.pattern, exclude="*downsample*", recipe=recipe or DEFAULT,
            solver=None if recipe is None else "newton", seed=seed, progress=False,
        )  # fmt: skip
    seconds = round(time.perf_counter() - began, 2)
    outcome = correct(result.model, test, labels)
    layers = [
        {
            "name": layer.name,
            "horizon": layer.horizon,
            "loss_masked": layer.solves[0].loss_masked,
            "losses": [solve.loss for solve in layer.solves],
            "cg_steps": sum(solve.cg_steps for solve in layer.solves),
        }
        for layer in result.report.layers
        if layer.solves
    ]
    return outcome, {
        "seed": seed,
        "accuracy": percent(outcome),
        "seconds": seconds,
        "peak_memory_bytes": result.report.peak_memory_bytes,
        "sparsity": result.report.sparsity,
        "network_sparsity": result.report.network_sparsity,
        "layers": layers,
    }


def correct(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One if an image is classified rightly, else zero; float64."""
    return (predict(model, x).argmax(1).cpu() == y).double()


def percent(outcome: Tensor) -> float:
    return round(100 * float(outcome.mean()), 2)


def paired_drop(dense: Tensor, pruned: Tensor) -> tuple[float, float]:
    """Points lost on the same images, averaged over seeds, and half the width of its 95 % interval."""
    difference = 100 * (dense - pruned.mean(0))
    return round(float(difference.mean()), 2), round(1.96 * float(difference.std()) / len(difference) ** 0.5, 2)


def environment(device: str) -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip() if commit.returncode == 0 else "unknown",
        "snows": snows.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine(),
    }


if __name__ == "__main__":
    main()
