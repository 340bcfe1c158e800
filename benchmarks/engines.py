"""What sparse weights are worth on a CPU: `snows.bench` on ResNet50 and a vision transformer, dense to 0.9 sparse.

    python benchmarks/engines.py                       # two threads; benchmarks/results/engines.json
    python benchmarks/engines.py --only vit-s-0.9

One row a network and sparsity, in torch (eager, and CSR layers), ONNX Runtime, and OpenVINO with the decompression of
sparse weights off and on, at batch sizes 1 and 8. A row that the file has is not measured again (remove the file to do
so). Weights are random and masks by magnitude, the same sparsity in every layer: engines look at zeros alone. Times are
of a quiet machine or mean little; every row says how far its quartiles are apart.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from accuracy import HERE
from networks import ResNet50, ViT
from sections import Row, measure_rows
from torch import nn

import snows

NETWORKS: dict[str, Callable[[], nn.Module]] = {"resnet50": ResNet50, "vit-s": lambda: ViT(384, 12, 6)}
SPARSITIES = (0.5, 0.7, 0.9)
ENGINES = ("torch", "onnxruntime", "openvino")
BATCHES = (1, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "engines.json")
    parser.add_argument("--only", help="such as vit-s-0.9")
    parser.add_argument("--limit", type=float, default=50.0, help="seconds of one row")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    cases = [
        ({"network": name, "sparsity": sparsity}, partial(measure, name, sparsity, options.limit))
        for sparsity in reversed(SPARSITIES)
        for name in NETWORKS
        if options.only in (None, f"{name}-{sparsity}")
    ]
    measure_rows(iter(cases), options.out, "cpu")


def measure(name: str, sparsity: float, limit: float) -> Row:
    began = time.perf_counter()
    torch.manual_seed(0)
    model, images = NETWORKS[name]().eval(), torch.randn(2, 3, 224, 224)
    with tempfile.TemporaryDirectory() as folder:
        pattern = f"{sparsity} uniform"
        result = snows.prune(model, images, pattern, exclude="*downsample*", solver=None, progress=False)
        saved = result.save(Path(folder) / "pruned")
        found = snows.bench(
            saved, model, batches=BATCHES, engines=ENGINES, modes=["eager"], device="cpu", limit=limit, progress=False
        )
    data = found.to_dict()
    for layer in data["layers"]:
        layer.pop("elsewhere")
    kept = ("machine", "flops", "layers", "prune", "not_timed")
    figures = {"network_timings": data["network"], **{key: data[key] for key in kept}}
    return {**figures, "seconds": round(time.perf_counter() - began, 1)}


if __name__ == "__main__":
    main()
