"""What torchrun starts in tests: every case on one rank, and what came of it in a file.

torchrun --nproc-per-node 2 -m tests.distributed.on_a_rank FOLDER
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.cases import CASES


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    found = {}
    for name, case in CASES.items():
        result = case.run()
        losses = [(solve.loss, solve.loss_masked) for layer in result.report.layers for solve in layer.solves]
        found[name] = {"weights": result.model.state_dict(), "masks": result.masks, "losses": losses}
    torch.save(found, folder / f"{dist.get_world_size()}-{dist.get_rank()}.pt")
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
