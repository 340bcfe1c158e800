"""What several ranks are worth: a CG step takes what it computes, divided by the ranks, and one sum over them.

    python benchmarks/ranks.py steps         # both parts, measured on one, two and three CPU ranks
    python benchmarks/ranks.py projection    # on 8 and 64 GPUs, from products measured on one: nothing is run
    python benchmarks/ranks.py runs          # whole runs, on paper: nothing is run

One JSON file a section under benchmarks/results, `ranks-SECTION.json`; rows that it has are not measured again (remove
the file to do so). Ranks have one thread each. On a machine with fewer cores than ranks look at the processor's time.

The sum is modelled as rings: 2 (p - 1) / p times the bytes, within a host over NVLink, then between hosts over
InfiniBand, where each GPU of a host sends its eighth. What is assumed stands in capital letters below.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from accuracy import HERE
from sections import Row, Section, make_parser, measure_rows

NVLINK = 450e9  # bytes a second in each direction: fourth generation, 18 links of 25 GB/s (NVIDIA H200)
INFINIBAND = 50e9  # bytes a second: 400 Gb/s for each GPU (NVIDIA DGX H200, ConnectX-7)
IN_A_HOST = 8  # GPUs
CALL, HOP = 50e-6, 30e-6  # seconds: to start a sum and read whether a rank failed; more, where hosts take part. Assumed
FLOOR = 0.75e-3  # seconds: the shortest product that was measured; launching its operations takes as long
GPUS = (1, 8, 64)
IN_PRODUCTS = 1000  # samples, by default

# Of whole runs.
SECONDS_OF_A_WEIGHT = 78.7 / (12.6e6 * 5000 * 197)  # for each token: ViT-L, one block at K = 1 (vit-sizes.json)
SUMS = 60  # of the size of a layer's weight, for each layer: products, gradients. Assumed
FACTORIZATIONS, FACTOR_RATE = (
    10,
    1e13,
)  # of each layer, and their operations a second. Assumed; every rank does them all
FLOAT, DOUBLE = 4, 8  # bytes


@dataclass(frozen=True)
class Network:
    """Of `layers` matrices, whose inputs have `columns` in the largest."""

    name: str
    weights: float  # of the matrices
    blocks: int
    columns: tuple[int, ...]  # of the matrices of a block
    width: int
    samples: int
    tokens: int  # of a sample


NETWORKS = (
    Network("ViT-L/16", 302e6, 24, (1024, 1024, 1024, 4096), 1024, 20_000, 197),
    Network("language model, 8B", 6.98e9, 32, (4096,) * 6 + (14_336,), 4096, 128, 2048),
    Network("language model, 70B", 68.5e9, 80, (8192,) * 6 + (28_672,), 8192, 128, 2048),
)


def all_reduce(size: float, gpus: int) -> float:
    """Seconds of one sum of so many bytes."""
    if gpus == 1:
        return 0.0
    inside = min(gpus, IN_A_HOST)
    hosts = gpus // inside
    seconds = CALL + 2 * (inside - 1) / inside * size / NVLINK
    if hosts > 1:
        seconds += HOP + 2 * (hosts - 1) / hosts * size / inside / INFINIBAND
    return seconds


def steps(samples: int | None) -> Section:
    """Of a small layer and of a large one."""
    for network in ("resnet20", "wide"):
        for ranks in (1, 2, 3):
            count = samples or IN_PRODUCTS
            yield {"network": network, "ranks": ranks, "samples": count}, partial(_step, network, ranks, count)


def _step(network: str, ranks: int, samples: int) -> Row:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(HERE / "ranks_step.py"), network, str(samples)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return {**row, "cores": os.cpu_count(), "load": os.getloadavg()[0]}


def projection(samples: int | None) -> Section:
    """The measured products, of as many samples as are taken by default."""
    for row in json.loads((HERE / "results" / "speed-product.json").read_text())["rows"]:
        for gpus in GPUS:
            what = {"network": row["network"], "layer": row["layer"], "horizon": row["horizon"], "gpus": gpus}
            yield what, partial(_projected, row, gpus, samples or IN_PRODUCTS)


WEIGHTS = {
    "layer1.0.conv2": 2304, "layer2.1.conv1": 9216, "layer3.2.conv1": 36_864,
    "layer1.1.conv2": 36_864, "layer3.2.conv2": 589_824, "layer4.1.conv2": 2_359_296,
}  # fmt: skip


def _projected(row: Row, gpus: int, samples: int) -> Row:
    whole = row["seconds"] * samples / row["samples"]
    compute, weights = max(whole / gpus, FLOOR), WEIGHTS[row["layer"]]
    return {
        "measured_seconds": row["seconds"], "measured_samples": row["samples"], "samples": samples, "weights": weights,
        "compute_seconds": compute, "reduce_seconds": all_reduce(FLOAT * weights, gpus),
    }  # fmt: skip


def runs(samples: int | None) -> Section:
    for network in NETWORKS:
        for gpus in GPUS:
            what = {"network": network.name, "gpus": gpus, "samples": samples or network.samples}
            yield what, partial(_run, network, gpus, samples or network.samples)


def _run(network: Network, gpus: int, samples: int) -> Row:
    tokens, layers = samples * network.tokens, network.blocks * len(network.columns)
    shared = network.weights * tokens * SECONDS_OF_A_WEIGHT / gpus
    operations = network.blocks * sum(columns**3 / 3 for columns in network.columns)
    own = FACTORIZATIONS * operations / FACTOR_RATE
    sums = layers * SUMS * all_reduce(FLOAT * network.weights / layers, gpus)
    sums += network.blocks * sum(all_reduce(DOUBLE * columns**2, gpus) for columns in network.columns)
    values = 2 * 2 * tokens / gpus * network.width * FLOAT  # two streams of two values
    return {
        "shared_hours": shared / 3600, "own_hours": own / 3600, "sum_hours": sums / 3600,
        "weight_bytes": 2 * FLOAT * network.weights, "activation_bytes": values,
        "moment_bytes": 3 * DOUBLE * max(network.columns) ** 2,
    }  # fmt: skip


SECTIONS: dict[str, Callable[[int | None], Section]] = {"steps": steps, "projection": projection, "runs": runs}


def main() -> None:
    options = make_parser(__doc__, SECTIONS).parse_args()
    path = options.out / f"ranks-{options.section}.json"
    measure_rows(SECTIONS[options.section](options.samples), path, "cpu")


if __name__ == "__main__":
    main()
