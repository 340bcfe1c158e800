"""Runs that are killed at random moments: `scripts/kill.py` and `scripts/ranks.py`, a few kills of each."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import kill
import ranks


@pytest.mark.slow
def test_the_embedded_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        killing = kill.Killing(tmp_path, random.Random(1))
        killing.one_run(4)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not killing.problems
    assert killing.kills


@pytest.mark.slow
def test_ranks_that_are_killed_stop_and_go_on(tmp_path: Path) -> None:
    launches = ranks.Launches(tmp_path, random.Random(2))
    for _ in range(3):
        launches.one()
    assert not launches.problems
    assert launches.kills
