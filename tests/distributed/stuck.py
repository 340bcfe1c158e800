"""What torchrun starts in tests: a rank dies while another is in a call that does not end, as calls of NCCL may be.

torchrun --nproc-per-node 2 -m tests.distributed.stuck
"""

from __future__ import annotations

import ctypes
import os
import signal
import time

import torch.distributed as dist

from snows.devices.distributed.group import current_ranks


def wait_for_ever() -> None:
    """In C, where no signal is heard: a lock that this thread has already."""
    lock = ctypes.create_string_buffer(64)
    take = ctypes.CDLL(None).pthread_mutex_lock
    take(lock)
    take(lock)


def main() -> None:
    dist.init_process_group("gloo")
    current_ranks().gathered("here")
    time.sleep(2)  # until both have been heard
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_ever()


if __name__ == "__main__":
    main()
