"""How much memory work may take at once, where it can be cut into rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_CPU_BYTES = 1 << 30
_SHARE_OF_FREE = 0.25  # of a GPU's memory

_limit: ContextVar[int | None] = ContextVar("limit", default=None)


@contextmanager
def working_within(most_bytes: int) -> Iterator[None]:
    """Inside, `bytes_at_once` is at most `most_bytes`."""
    token = _limit.set(most_bytes)
    try:
        yield
    finally:
        _limit.reset(token)


def bytes_at_once(device: torch.device) -> int:
    """How many bytes rows that are worked on together may take."""
    usual = _CPU_BYTES
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        usual = int(_SHARE_OF_FREE * free)
    limit = _limit.get()
    return usual if limit is None else min(usual, limit)
