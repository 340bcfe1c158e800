"""The embedded run, killed at random moments: `scripts/kill.py`, a few kills of it."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import kill


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
