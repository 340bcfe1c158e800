"""Throws damaged files and odd words at everything that reads input: a sentence may come out, a traceback never.

    python scripts/fuzz.py --cases 20000 --seconds 600 --seed 0

A case depends on the seed and its number alone: `--start NUMBER --cases 1` does one again. Exit status 1, with the
failing cases in a folder, if anything but success or an error on purpose comes out, if a case takes more than
--case-seconds, casts or loses numbers in silence, writes a file outside of its own folder, shows escape codes, or if
memory rises by more than --memory. `fuzzing/classes.py` lists the classes of cases.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from fuzzing.classes import TARGETS
from fuzzing.run import fuzzing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20000)
    parser.add_argument("--seconds", type=float, default=600, help="stop then, whatever is left")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", choices=sorted(target.__name__ for target in TARGETS), help="one target")
    parser.add_argument("--case-seconds", type=int, default=20, help="a case that takes longer has failed")
    parser.add_argument("--memory", type=float, default=1.0, help="GiB that the process may grow by")
    parser.add_argument("--failures", type=Path, default=Path(tempfile.gettempdir()) / "snows-fuzz-failures")
    given = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    limits = {"seconds_of_a_case": given.case_seconds, "most_memory": int(given.memory * 2**30)}
    with fuzzing(given.failures, **limits) as fuzz:
        end = time.monotonic() + given.seconds
        for number in range(given.start, given.start + given.cases):
            if time.monotonic() > end:
                break
            fuzz.run(given.seed, number, given.only)
    print(fuzz.summary())
    sys.exit(1 if fuzz.failed else 0)


if __name__ == "__main__":
    main()
