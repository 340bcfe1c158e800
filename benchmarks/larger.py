"""A language model whose weights do not fit the memory that pruning may use, beside the same with memory to spare.

    python benchmarks/larger.py memory --device cuda        # 1.5 billion random weights, 6 GB: with 4 GiB, and with all
    python benchmarks/larger.py memory --device cuda --memory 4GiB     # one of the two
    python benchmarks/larger.py memory --tiny --out /tmp/tiny --device cpu

Every run is a process of its own, so that peaks are its own. Pruned is to 2:4 with K=0. Weights and tokens are random:
time and memory do not depend on their values. One JSON file under benchmarks/results; rows that it has are not measured
again (remove the file to do so).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from typing import Any

import llama
import torch
from sections import Row, Section, make_parser, measure_rows

import snows
from snows.recipe import DEFAULT

LARGE = llama.Shape(
    vocabulary=32000, width=2048, hidden=5632, layers=32, heads=32, key_value_heads=8, theta=10000.0, epsilon=1e-5
)
TINY = llama.Shape(
    vocabulary=48, width=32, hidden=96, layers=2, heads=4, key_value_heads=2, theta=10000.0, epsilon=1e-5
)
BUDGETS = {False: ("4GiB", "all"), True: ("80kB", "all")}
PATTERN = "2:4"
TO_SPARE = "all"


def main() -> None:
    parser = make_parser(__doc__, ["memory"])
    parser.add_argument("--tiny", action="store_true", help="a network of 26,000 weights, to try the benchmark")
    parser.add_argument("--memory", nargs="*", help=f"budgets, of which {TO_SPARE!r} is none (default: see above)")
    parser.add_argument("--length", type=int, help="tokens in a sample (default: 512)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore", snows.SnowsWarning)
    options.samples = options.samples or (16 if options.tiny else 64)
    options.length = options.length or (12 if options.tiny else 512)
    if options.one is not None:
        print(json.dumps(one(options, options.one)))
        return
    measure_rows(section(options), options.out / "larger.json", options.device)


def section(options: argparse.Namespace) -> Section:
    for memory in options.memory or BUDGETS[options.tiny]:
        what = {"pattern": PATTERN, "samples": options.samples, "length": options.length, "memory": memory}
        yield what, lambda memory=memory: in_fresh_process(options, memory)  # type: ignore[misc]


def in_fresh_process(options: argparse.Namespace, memory: str) -> Row:
    command = [sys.executable, __file__, options.section, "--device", options.device, "--one", memory]
    command += ["--samples", str(options.samples), "--length", str(options.length), *["--tiny"] * options.tiny]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def one(options: argparse.Namespace, memory: str) -> Row:
    """Peaks are of the whole process: of the device, and of host memory with the model that the caller holds."""
    shape = TINY if options.tiny else LARGE
    model = random_llama(shape)
    tokens = torch.randint(
        0, shape.vocabulary, (options.samples, options.length), generator=torch.Generator().manual_seed(1)
    )
    began = time.perf_counter()
    report = snows.prune(
        model, tokens, PATTERN, horizon=0, recipe=DEFAULT, device=options.device, progress=False,
        memory=None if memory == TO_SPARE else memory,
    ).report  # fmt: skip
    return {
        "weights": sum(parameter.numel() for parameter in model.parameters()),
        "weight_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "layers": len(report.layers),
        "sparsity": round(report.sparsity, 4),
        "loss_ratio": sum(solve.loss for solve in last(report)) / sum(solve.loss_masked for solve in last(report)),
        "seconds": round(time.perf_counter() - began, 1),
        "phases": [{"phase": phase.name, "seconds": round(phase.seconds, 1)} for phase in report.phases],
        "peak_memory_bytes": report.peak_memory_bytes,
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def last(report: Any) -> list[Any]:
    """The final solve of each layer."""
    return [layer.solves[-1] for layer in report.layers]


def random_llama(shape: llama.Shape) -> llama.Llama:
    """Weights of a scale that keeps activations finite through all layers."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = llama.Llama(shape)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0, 0.02)
    return model.eval()


if __name__ == "__main__":
    main()
