"""What torchrun starts for `ranks.py`: the parts of a CG step on every rank, as one line of JSON.

torchrun --nproc-per-node 2 benchmarks/ranks_step.py NETWORK SAMPLES
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from problems import layer_problem
from torch import Tensor, nn

from snows.data import embedded
from snows.devices.distributed.group import Group, current_ranks
from snows.solve.objective import restrict

PIECE = 250  # samples of a micro-batch on a CPU
REPEATS = 15


def problem_of(network: str, samples: int) -> tuple[nn.Module, Tensor, str, int]:
    """Network, samples, layer and horizon."""
    if network == "resnet20":
        x = embedded.images()[0]
        return embedded.model(), x[:samples], "layer1.0.conv2", 16
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    return wide.eval(), torch.randn(samples, 1024), "2", 2


class Clocks:
    """Of the steps of this rank: what it computes, and what the sum over ranks takes once all have arrived."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._reduce = Group._reduce

    def reduce(self, group: Group, tensor: Tensor) -> None:
        computed, busy = time.perf_counter(), time.thread_time()
        dist.barrier()
        arrived = time.perf_counter()
        self._reduce(group, tensor)
        self.steps[-1] |= {"computed": computed, "busy": busy, "reduce": time.perf_counter() - arrived}

    def step(self, product: Any, v: Tensor) -> None:
        self.steps.append({})
        began, idle = time.perf_counter(), time.thread_time()
        product(v)
        ended = time.perf_counter()
        step = {"reduce": 0.0, "computed": ended, "busy": time.thread_time(), **self.steps[-1]}
        self.steps[-1] = {
            "cpu_seconds": step["busy"] - idle, "compute_seconds": step["computed"] - began,
            "reduce_seconds": step["reduce"],
        }  # fmt: skip


def main(network: str, samples: str) -> None:
    dist.init_process_group("gloo")
    ranks, clocks = current_ranks(), Clocks()
    model, x, layer, horizon = problem_of(network, int(samples))
    problem = layer_problem(model, x, "cpu", layer, "2:4", horizon, PIECE, ranks)
    weight = problem.packing.pack([problem.dense.parameters[part.parameter] for part in problem.layers])
    mask = torch.ones_like(weight)
    product = restrict(problem.objective("variance").product("gauss-newton", weight, keep=True), mask)
    v = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    with mock.patch.object(Group, "_reduce", lambda group, tensor: clocks.reduce(group, tensor)):
        for _ in range(REPEATS + 1):
            dist.barrier()
            clocks.step(product, v)
    own = {key: statistics.median(step[key] for step in clocks.steps[1:]) for key in clocks.steps[0]}
    found = ranks.gathered(own)
    if ranks.is_first:
        slowest = {key: max(each[key] for each in found) for key in own}
        print(json.dumps({"weights": weight.numel(), "layer": layer, "horizon": horizon, **slowest}), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
