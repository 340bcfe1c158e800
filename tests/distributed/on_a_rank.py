"""What torchrun starts in tests: every case on one rank, and what came of it in a file.

torchrun --nproc-per-node 2 -m tests.distributed.on_a_rank FOLDER
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import snows
from snows.evaluation import tolerance
from snows.masks import elimination, obc
from snows.solve.objective import Objective, Piece
from tests.distributed.cases import (
    CASES,
    COMPARED,
    IN_PIECES,
    MEMORY_OF_LAST_STAGE,
    MEMORY_OF_ROWS,
    OUT_OF_MEMORY,
    READ,
    SENSITIVITY,
    SINGLE,
    Counted,
    compared,
    full_memory_of_last_stage,
    sensitivity,
)


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    found = {name: facts(case.run()) for name, case in {**CASES, **SINGLE}.items()}
    with full_memory_at(rank=dist.get_world_size() - 1):
        found[OUT_OF_MEMORY] = facts(CASES["residual"].run())
    with full_memory_of_rows():
        found[MEMORY_OF_ROWS] = facts(CASES["mask obc"].run())
    found[READ] = sorted(Counted.read)
    with full_memory_of_last_stage(dist.get_rank() == dist.get_world_size() - 1):
        found[MEMORY_OF_LAST_STAGE] = facts(IN_PIECES.run())
    found[COMPARED] = compared()
    with mock.patch.object(tolerance, "_measured", side_effect=tolerance._measured) as measured:
        found[SENSITIVITY] = sensitivity(), measured.call_count
    torch.save(found, folder / f"{dist.get_world_size()}-{dist.get_rank()}.pt")
    dist.barrier()


def facts(result: snows.Result) -> dict[str, Any]:
    return {
        "weights": result.model.state_dict(),
        "masks": result.masks,
        "losses": losses(result),
        "warnings": list(result.report.warnings),
    }


def losses(result: snows.Result) -> list[float]:
    """Of all solves, before and after."""
    solves = [solve for layer in result.report.layers for solve in layer.solves]
    return [loss for solve in solves for loss in (solve.loss_masked, solve.loss) if loss is not None]


@contextmanager
def full_memory_of_rows() -> Iterator[None]:
    """The last rank has no memory for its first inverse, and the first one none for the rows that come next."""
    inverse, eliminate, inverses, parts = obc.inverse, elimination._eliminate, count(), count()

    def no_inverse(gram: Tensor) -> Tensor:
        if next(inverses) == 0 and dist.get_rank() == dist.get_world_size() - 1:
            raise torch.OutOfMemoryError("full")
        return inverse(gram)

    def no_rows(*arguments: Any) -> Any:
        if next(parts) == 1 and dist.get_rank() == 0:
            raise torch.OutOfMemoryError("full")
        return eliminate(*arguments)

    with mock.patch.object(obc, "inverse", no_inverse), mock.patch.object(elimination, "_eliminate", no_rows):
        yield


@contextmanager
def full_memory_at(rank: int) -> Iterator[None]:
    """On one rank the first loss runs out of memory."""
    pieces, calls = Objective._own_pieces, count()

    def failing(self: Objective) -> Iterator[Piece]:
        if next(calls) == 0 and dist.get_rank() == rank:
            raise torch.OutOfMemoryError("full")
        return pieces(self)

    with mock.patch.object(Objective, "_own_pieces", failing):
        yield


if __name__ == "__main__":
    main(Path(sys.argv[1]))
