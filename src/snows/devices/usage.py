"""How much memory is used right now."""

from __future__ import annotations

import sys
from pathlib import Path

_PAGES = Path("/proc/self/statm")  # the second number: resident pages


def memory_in_use() -> int | None:
    """Bytes of the GPUs, if this process uses any, else of host memory. None where the system does not say."""
    torch = sys.modules.get("torch")  # not imported for this
    if torch is not None and torch.cuda.is_initialized():
        return sum(int(torch.cuda.memory_allocated(device)) for device in range(torch.cuda.device_count()))
    try:
        import resource

        return int(_PAGES.read_text().split()[1]) * resource.getpagesize()
    except (OSError, ImportError):
        return None
