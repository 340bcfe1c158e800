"""A fuzz whose cases hang and take memory, as a process of its own: its alarms must not reach the tests.

python -m tests.property.hanging FOLDER
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from fuzzing import run

import snows

kept: list[bytes] = []


def hanging(case: object) -> None:
    while True:
        try:
            time.sleep(60)
        except Exception:  # as a careless reader would
            continue


def careless(case: object) -> None:
    """Takes even the alarm for an error of the file, once."""
    try:
        time.sleep(60)
    except BaseException:
        time.sleep(60)


def slow_to_end(case: object) -> None:
    """Cleans up for longer than a case may take."""
    try:
        time.sleep(60)
    finally:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            pass


def endless(case: object) -> None:
    while True:
        sum(range(1000))


def growing(case: object) -> None:
    kept.append(b"x" * (200 << 20))
    raise snows.InputError("refused, but at a price")


def small(case: object) -> None:
    raise snows.InputError("refused")


CASES = (small, hanging, careless, slow_to_end, endless, growing, small)


def main(failures: Path) -> None:
    run.TARGETS.clear()
    run.TARGETS.update(dict.fromkeys(CASES, 1))
    with run.fuzzing(failures, seconds_of_a_case=1, most_memory=100 << 20) as fuzz:
        for number, case in enumerate(CASES):
            fuzz.run(0, number, case.__name__)
        time.sleep(1.5)  # an alarm that is left behind rings now


def ring_late() -> None:
    """The alarm rings when its time is taken away, at the end of a case."""
    set_timer, before = signal.setitimer, signal.getsignal(signal.SIGALRM)

    def late(which: int, seconds: float) -> None:
        if not seconds:
            signal.raise_signal(signal.SIGALRM)
        set_timer(which, seconds)

    with mock.patch.object(signal, "setitimer", late), run.time_limit(1000):
        pass
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
