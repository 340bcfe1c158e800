"""How much is worked on at once where work can be cut into rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_CPU_BYTES = 1 << 30


_SHARE_OF_FREE = 0.25


_allowed: ContextVar[int | None] = ContextVar("allowed", default=None)


@contextmanager
def working_within(most_bytes: int) -> Iterator[None]:
    """What a method does in here holds at most this much at once, where it goes row by row."""
    token = _allowed.set(most_bytes)
    try:
        yield
    finally:
        _allowed.reset(token)


def bytes_at_once(device: torch.device) -> int:
    """For rows that are worked on together."""
    usual = _CPU_BYTES
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        usual = int(_SHARE_OF_FREE * free)
    allowed = _allowed.get()
    return usual if allowed is None else min(usual, allowed)
