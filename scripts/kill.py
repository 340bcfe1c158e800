"""Kills the embedded run at random moments and goes on with it: does it end with the very same bits?

    python scripts/kill.py --kills 40 --seconds 1500

The run is `snows prune` on the embedded network, with a last stage, on a few images, or on as many as the demo takes
(--samples 1000). Every process of it gets SIGTERM, SIGINT or SIGKILL at a random moment, half of them while layers are
solved, half of them in the last stage. The same command follows, with the same --resume folder. After a few kills it is
left to end, and its weights and masks are compared byte by byte with those of a run that nobody disturbed. Exit status
1 if any differ.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
INTERRUPTED = 130  # the exit status of our own words; before they are loaded, Python ends itself by the signal
KILLS_OF_A_RUN = 8  # after which it may end
LONGEST = 300  # seconds that a process may take, or need to stop
COMPARED = ("model.safetensors", "masks.safetensors")
OPTIONS = ["--pattern", "2:4", "--effort", "fast", "--horizon", "2", "--quiet", "--config", "c.toml"]
CONFIG = "[recipe]\nfinish_steps = 16\n"


@dataclass
class Killing:
    """Runs in one folder. `kills` counts signals and where they struck."""

    folder: Path
    chance: random.Random
    samples: int = 48
    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    runs: int = 0
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored, which children inherit
        (self.folder / "c.toml").write_text(CONFIG)
        began = time.monotonic()
        whole = self._start("whole", "undisturbed")
        if whole.wait(LONGEST):
            raise RuntimeError("the undisturbed run failed")
        self.seconds = time.monotonic() - began
        self.expected, self.layers = self._digest("whole"), self._kept("undisturbed")
        began = time.monotonic()
        self._start("again", "undisturbed").wait(LONGEST)
        self.last_stage = time.monotonic() - began  # and what comes before it, if all layers are kept

    def one_run(self, kills: int) -> None:
        """Kill a run so often, let it end, and compare."""
        state, out = f"state{self.runs}", f"out{self.runs}"
        self.runs += 1
        for number in range(kills):
            process = self._start(out, state)
            moment = self._moment(process, state, max(0, kills // 2 - number))
            if process.poll() is not None:
                break  # it was quicker than expected
            self._kill(process, state, moment)
        if process.returncode != 0:
            process = self._start(out, state)
        if process.wait(LONGEST) != 0:
            self.problems.append(f"run {self.runs} ended with status {process.returncode}")
        elif self._digest(out) != self.expected:
            self.problems.append(f"run {self.runs} ended with other bits")

    def _moment(self, process: subprocess.Popen[bytes], state: str, waiting: int) -> str:
        """Wait for the moment of a kill: in the cascade, of which `waiting` kills have a share, or in the last stage.

        Moments go by the layers that are kept: how fast a busy machine gets there is another matter.
        """
        before = self._kept(state)
        waiting = waiting if before < self.layers else 0
        layers = before + self.chance.randint(0, (self.layers - before - 1) // waiting) if waiting else self.layers
        while process.poll() is None and self._kept(state) < layers:
            time.sleep(0.02)
        if waiting:
            _wait(process, self.chance.uniform(0, 2) * self.seconds / self.layers)
        else:
            share = self.chance.uniform(*((0.3, 0.95) if before == self.layers else (0, 0.6)))
            _wait(process, share * self.last_stage)
        return "last stage" if self._kept(state) == self.layers else "cascade"

    def _kill(self, process: subprocess.Popen[bytes], state: str, moment: str) -> None:
        how = self.chance.choice(SIGNALS)
        process.send_signal(how)
        try:
            status = process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self.problems.append(f"{how.name} in the {moment} did not end the process within {LONGEST} s")
            return
        self.kills[how.name, "before the first layer" if not self._kept(state) else moment] += 1
        if status not in (0, -how, INTERRUPTED if how is signal.SIGINT else 0):  # 0: it had just ended
            self.problems.append(f"{how.name} in the {moment} ended the process with status {status}")

    def _start(self, out: str, state: str) -> subprocess.Popen[bytes]:
        options = [*OPTIONS, "--samples", str(self.samples), "--out", out, "--force", "--resume", state]
        command = [sys.executable, "-m", "snows", "prune", *options]
        source = str(Path(__file__).parents[1] / "src")
        environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}  # the fastest on a busy machine
        return subprocess.Popen(command, cwd=self.folder, env=environment, stderr=subprocess.DEVNULL)

    def _kept(self, state: str) -> int:
        """How many solves are kept in a folder of --resume."""
        return len(list((self.folder / state / "layers").glob("sweep*-layer*.safetensors")))

    def _digest(self, out: str) -> list[str]:
        return [hashlib.sha256((self.folder / out / name).read_bytes()).hexdigest() for name in COMPARED]

    def summary(self) -> str:
        rows = [f"{count:>4}  {how:<8} {place}" for (how, place), count in sorted(self.kills.items())]
        ended = f"{sum(self.kills.values())} kills of {self.runs} runs, {len(self.problems)} problems"
        return "\n".join([*rows, *self.problems, ended])


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=1500, help="begin no further run then")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory(prefix="snows-kill-") as folder:
        killing = Killing(Path(folder), random.Random(given.seed), given.samples)
        while (left := given.kills - sum(killing.kills.values())) > 0 and time.monotonic() < end:
            killing.one_run(min(left, KILLS_OF_A_RUN))
            print(killing.summary(), flush=True)
    sys.exit(1 if killing.problems else 0)


if __name__ == "__main__":
    main()
