"""Settings of the whole suite: one thread, examples that are the same in every run, and Ctrl-C that is noticed."""

from __future__ import annotations

import signal

import torch
from hypothesis import HealthCheck, settings

# Networks this small are slower on more threads, on a busy machine fifty times: the threads wait for each other.
torch.set_num_threads(1)
# A deadline would fail on a busy machine; derandomized examples make a failure repeatable by anyone.
settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")
# Jobs in the background of a shell ignore Ctrl-C, and so would all processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
