"""What torchrun starts in tests: a run in which one rank ends itself in the middle of a layer.

    torchrun --nproc-per-node 3 -m tests.distributed.dying RESUME OUT [VICTIM LOSSES]

The victim dies at its so many-th loss. Without a victim the run ends as it should, and rank 0 saves its result.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from itertools import count

import torch.distributed as dist
from torch import Tensor

from snows.solve.objective import Objective
from tests.distributed.cases import CASES


def die_at(losses: int) -> None:
    """This process ends without a word at a loss."""
    numbers, loss = count(1), Objective.loss

    def deadly(self: Objective, weight: Tensor) -> float:
        if next(numbers) == losses:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(self, weight)

    Objective.loss = deadly  # type: ignore[method-assign]


def main(resume: str, out: str, victim: str = "-1", losses: str = "0") -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    if dist.get_rank() == int(victim):
        die_at(int(losses))
    CASES["residual"].run(resume=resume).save(out)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
