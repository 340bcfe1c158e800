"""The default recipe of this version beside that of another, on whole networks: time, peak memory, accuracy.

    python benchmarks/versions.py --before ../v0.12 --networks resnet50 --device cuda

`--before` is a checkout of the other version (its `src` and `benchmarks` are enough). Each run has a process of its
own; both versions are timed in the same call, after a small run that loads libraries and kernels. Accuracy is that of
validation a and b, and its drop from the other version is paired image by image.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from accuracy import paired_drop, percent
from networks import normalization
from sections import HERE, Row, Section, make_parser, measure_rows

from snows.data.sources import read_npz

CASES = {"resnet50": "2:4", "mobilenet": "0.7", "vit": "2:4"}
IMAGES, FEW = 1000, 16
ONCE = """
import json, sys, time, warnings
from pathlib import Path
import torch, snows
from networks import load_network
warnings.simplefilter("ignore")
network, pattern, shared, data, out, device = sys.argv[1:]
model = load_network(network, Path(shared)).to(device)
data = torch.load(data, weights_only=True)
options = dict(exclude="*downsample*", progress=False)
few = snows.Recipe(horizon=0, sweeps=1, finish_steps=2)
snows.prune(model, data["calibration"][:FEW], pattern, recipe=few, **options)
if device == "cuda":
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
began = time.perf_counter()
result = snows.prune(model, data["calibration"], pattern, **options)
seconds = time.perf_counter() - began
peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
with torch.no_grad():
    found = [result.model(x.to(device)).argmax(1).cpu() for x in data["test"].split(125)]
torch.save((torch.cat(found) == data["labels"]).double(), out)
print(json.dumps({"version": snows.__version__, "seconds": round(seconds, 1), "peak_memory_bytes": peak}))
""".replace("FEW", str(FEW))


def main() -> None:
    parser = make_parser(__doc__, ("default",))
    parser.add_argument("--before", type=Path, required=True, help="a checkout of another version")
    parser.add_argument("--networks", nargs="*", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    rows = default(options.shared, options.before, options.networks, options.device, options.samples or IMAGES)
    measure_rows(rows, options.out / f"versions-{options.device}.json", options.device)


def default(shared: Path, before: Path, networks: list[str], device: str, count: int) -> Section:
    for network in networks:

        def measure(network: str = network) -> Row:
            with tempfile.TemporaryDirectory() as folder:
                data = stored_data(network, shared, count, Path(folder) / "data.pt")
                old, right_before = in_own_process(before, network, shared, data, device)
                new, right = in_own_process(HERE.parent, network, shared, data, device)
            drop, interval = paired_drop(right_before, right[None])
            facts = {f"{key}_before": value for key, value in old.items()}
            return {
                **new,
                **facts,
                "accuracy": percent(right),
                "accuracy_before": percent(right_before),
                "drop": drop,
                "drop_interval": interval,
            }

        yield {"network": network, "pattern": CASES[network], "images": count, "device": device}, measure


def stored_data(network: str, shared: Path, count: int, path: Path) -> Path:
    mean, std = normalization(network)
    calibration = read_npz(shared / "data" / "imagenet_calibration.npz", mean, std)[0][:count].clone()
    parts = [read_npz(shared / "data" / f"imagenet_val_{part}.npz", mean, std) for part in "ab"]
    labels = torch.cat([y for _, y in parts if y is not None])
    torch.save({"calibration": calibration, "test": torch.cat([x for x, _ in parts]), "labels": labels}, path)
    return path


def in_own_process(source: Path, network: str, shared: Path, data: Path, device: str) -> tuple[Row, torch.Tensor]:
    """The facts of a run with another source tree, and which test images are right afterwards."""
    paths = [str((source / folder).resolve()) for folder in ("src", "benchmarks")]
    out = data.with_name("right.pt")
    command = [sys.executable, "-c", ONCE, network, CASES[network], str(shared.resolve()), str(data), str(out), device]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    answer = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    facts: Row = json.loads(answer.stdout.splitlines()[-1])
    return facts, torch.load(out, weights_only=True)


if __name__ == "__main__":
    main()
