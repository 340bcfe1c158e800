"""Settings of the whole suite: two threads, and examples that are the same in every run."""

from __future__ import annotations

import logging

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(2)
logging.getLogger("torch.__trace").propagate = False  # pages of empty lines below every failure otherwise
# A deadline would fail on a busy machine; derandomized examples make a failure repeatable by anyone.
settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")
