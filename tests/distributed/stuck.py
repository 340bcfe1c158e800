"""What torchrun starts in tests: rank 1 dies, and where rank 0 is then.

torchrun --nproc-per-node 2 -m tests.distributed.stuck call     # in a call that does not end, as calls of NCCL may be
torchrun --nproc-per-node 2 -m tests.distributed.stuck leaving  # it has done its work, and waits for the others
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

from snows.devices.distributed.group import current_ranks
from snows.devices.distributed.launch import connected


def wait_for_ever() -> None:
    """In C, where no signal is heard: a lock that this thread has already."""
    lock = ctypes.create_string_buffer(64)
    take = ctypes.CDLL(None).pthread_mutex_lock
    take(lock)
    take(lock)


def main(where: str) -> None:
    with connected("cpu"):
        ranks = current_ranks()
        ranks.gathered("here")
        time.sleep(2)  # until both have been heard
        if not ranks.is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        if where == "call":
            wait_for_ever()


if __name__ == "__main__":
    main(*sys.argv[1:])
