"""Memory of our own process, for the command line."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc
_KEPT_BYTES = 1 << 30
_LARGEST_THRESHOLD = 32 << 20  # where glibc takes no larger one


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of giving it back to the system.

    Activations are allocated and freed all the time, and pages fresh from the system must be cleared first: on a CPU
    that took a tenth of a run. Does nothing with other C libraries.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_TOP_PAD, 64 << 20)
    if not mallopt(_MMAP_THRESHOLD, _KEPT_BYTES):
        mallopt(_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
