"""What torchrun tells the processes that it starts. It is read without importing torch."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext


def started_by_torchrun() -> bool:
    """Whether this process is one of several ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first() -> bool:
    """Whether this process writes files and shows progress."""
    return not started_by_torchrun() or os.environ.get("RANK", "0") == "0"


def name_of_rank() -> str:
    """Before messages of this rank: "rank 2: ". Nothing for the first one, or for a process alone."""
    return "" if is_first() else f"rank {os.environ['RANK']}: "


def connected(device: str | None) -> AbstractContextManager[None]:
    """Inside, the ranks that torchrun started are connected. A process alone goes on as it is.

    Args:
        device: Where the command will work. None: on a GPU if there is one.
    """
    if not started_by_torchrun():
        return nullcontext()
    from .group import connected as connected_ranks

    return connected_ranks(device, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
