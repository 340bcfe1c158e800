"""Kills ranks at random moments and goes on with the run: does one ever hang, or end with another result?

    python scripts/ranks.py --launches 50 --seconds 3000

The run is `torchrun -m snows prune` with two or three ranks, on a small network in float64 with a last stage, or
`--resume` of it. In every launch one rank gets SIGKILL: while the ranks start, while layers are solved, or while the
result is evaluated and saved. All ranks must have ended within a minute, with an exit status that is not zero, and
what is saved then, if anything, must be whole. The same command follows, with one, two or three ranks: its masks must
be those of an undisturbed run of one process, and its weights within a millionth. Exit status 1 if anything is not.
"""

from __future__ import annotations

import argparse
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

import torch
from safetensors.torch import load_file

SOURCE = Path(__file__).resolve().parents[1] / "src"
MOMENTS = ("start", "layers", "end")
LONGEST = 300  # seconds that a launch may take that nobody disturbs
TO_STOP = 60  # seconds after a kill
CLOSE = 1e-6  # relative to the largest weight of a tensor
NETWORK = """
import torch
from torch import nn

def make_model():
    torch.manual_seed(0)
    convolutions = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(4)]
    pooled = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4)]
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), *convolutions, *pooled).double().eval()

def make_data():
    return torch.randn(150, 4, 10, 10, generator=torch.Generator().manual_seed(1)).double()
"""
CONFIG = "[recipe]\nhorizon = 2\nsweeps = 2\nfinish_steps = 12\nfinish_batch = 32\n"
OPTIONS = ["--pattern", "2:4", "--device", "cpu", "--quiet", "--config", "c.toml", "--force"]


@dataclass
class Launches:
    """Launches in one folder. `kills` counts them by the moment and by what was said."""

    folder: Path
    chance: random.Random
    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    slowest: float = 0.0  # seconds from a kill until all ranks had ended
    count: int = 0
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "net.py").write_text(NETWORK)
        (self.folder / "c.toml").write_text(CONFIG)
        if self._start(1, "whole", "undisturbed").wait(LONGEST):
            raise RuntimeError("the undisturbed run failed")
        self.expected, self.layers = self._result("whole"), self._kept("undisturbed")

    def one(self) -> None:
        """Launch, kill a rank, look at what is left, go on, and compare."""
        self.count += 1
        out, state, ranks = f"out{self.count}", f"state{self.count}", self.chance.choice((2, 3))
        moment = self.chance.choice(MOMENTS)
        launch = self._start(ranks, out, state)
        victim = self._victim(launch, ranks)
        self._wait_for(moment, launch, out, state)
        solving = launch.poll() is None and 0 < self._kept(state) < self.layers
        with suppress(ProcessLookupError):
            os.kill(victim[1], signal.SIGKILL)
        self._stopped(launch, victim[0], moment, solving)
        if (self.folder / out).exists():
            self._compare(out, "was saved by a launch that was killed")
        again = self.chance.choice((1, 2, 3))
        resumed = self._start(again, out, state)
        if self._status(resumed, LONGEST) != 0:
            self._problem(f"could not go on with {again} ranks: {_last_line(self._errors(out))}")
        else:
            self._compare(out, f"came of {ranks} ranks and then {again}")

    def _victim(self, launch: subprocess.Popen[bytes], ranks: int) -> tuple[int, int]:
        """A rank and its process, as soon as all are there."""
        while launch.poll() is None and len(found := _ranks_of(launch.pid)) < ranks:
            time.sleep(0.01)
        rank = self.chance.randrange(ranks)
        return rank, found[rank]

    def _wait_for(self, moment: str, launch: subprocess.Popen[bytes], out: str, state: str) -> None:
        """Until a random moment. How fast a busy machine gets there is another matter."""
        if moment == "start":
            _wait(launch, self.chance.uniform(0, 6))
            return
        layers = self.chance.randrange(self.layers) if moment == "layers" else self.layers
        while launch.poll() is None and self._kept(state) < layers:
            time.sleep(0.01)
        if moment == "layers":
            _wait(launch, self.chance.uniform(0, 0.3))
        elif self.chance.random() < 0.5:
            _wait(launch, self.chance.uniform(0, 2))
        else:  # while the result is written
            while launch.poll() is None and not self._made(out):
                time.sleep(0.001)
            _wait(launch, self.chance.uniform(0, 0.05))

    def _made(self, out: str) -> list[Path]:
        """The folder of results, under this name or another one until it is whole."""
        return [path for path in self.folder.iterdir() if path.is_dir() and out in path.name]

    def _stopped(self, launch: subprocess.Popen[bytes], victim: int, moment: str, solving: bool) -> None:
        """Before they are connected, and after they have parted, ranks are named by torchrun alone."""
        began = time.monotonic()
        status = self._status(launch, TO_STOP)
        self.slowest = max(self.slowest, time.monotonic() - began)
        errors = self._errors(f"out{self.count}")
        said = "named" if f"rank {victim} of" in errors else "ended before" if status == 0 else "not named"
        self.kills[moment, said] += 1
        if status is None:
            self._problem(f"did not end within {TO_STOP} s after rank {victim} was killed ({moment})")
        elif status == 0 and not self._made(f"out{self.count}"):
            self._problem(f"ended well after rank {victim} was killed ({moment}), and nothing was saved")
        elif solving and said != "named":
            self._problem(f"did not name rank {victim}, which was killed between two layers:\n{errors}")
        elif f'File "{SOURCE / "snows"}' in errors:  # torchrun shows one of its own
            self._problem(f"showed a traceback after rank {victim} was killed ({moment}):\n{errors}")

    def _status(self, launch: subprocess.Popen[bytes], seconds: float) -> int | None:
        """The exit status. What hangs is ended."""
        try:
            return launch.wait(seconds)
        except subprocess.TimeoutExpired:
            for process in [*_ranks_of(launch.pid).values(), launch.pid]:
                os.kill(process, signal.SIGKILL)
            launch.wait()
            return None

    def _start(self, ranks: int, out: str, state: str) -> subprocess.Popen[bytes]:
        """What it says is in a file, the one of an earlier launch to the same folder overwritten."""
        several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        network = ["net.py:make_model", "--data", "net.py:make_data"]
        command = [sys.executable, *several, "-m", "snows", "prune", *network, *OPTIONS, "--out", out]
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{out}.txt").open("wb") as errors:
            return subprocess.Popen(
                [*command, "--resume", state],
                cwd=self.folder,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def _errors(self, out: str) -> str:
        return (self.folder / f"{out}.txt").read_text(errors="replace")

    def _kept(self, state: str) -> int:
        """How many solves are kept in a folder of --resume."""
        return len(list((self.folder / state / "layers").glob("sweep*-layer*.safetensors")))

    def _result(self, out: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        weights, masks = (load_file(self.folder / out / f"{name}.safetensors") for name in ("model", "masks"))
        return weights, masks

    def _compare(self, out: str, which: str) -> None:
        weights, masks = self._result(out)
        expected, expected_masks = self.expected
        if any(not torch.equal(masks[name], mask) for name, mask in expected_masks.items()):
            self._problem(f"other masks: what {which}")
        far = max(float((weights[n] - w).abs().max() / w.abs().max().clamp(min=1e-12)) for n, w in expected.items())
        if far > CLOSE:
            self._problem(f"weights are off by {far:.1e}: what {which}")

    def _problem(self, words: str) -> None:
        self.problems.append(f"launch {self.count}: {words}")

    def summary(self) -> str:
        rows = [f"{count:>4}  {moment:<7} {said}" for (moment, said), count in sorted(self.kills.items())]
        ended = f"{self.count} launches, {len(self.problems)} problems; all ranks had ended after {self.slowest:.0f} s"
        return "\n".join([*rows, *self.problems, ended])


def _ranks_of(launcher: int) -> dict[int, int]:
    """The processes that torchrun started, by rank."""
    found: dict[int, int] = {}
    with suppress(OSError):
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        for child in map(int, children):
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            found.update((int(text[5:]), child) for text in variables if text.startswith(b"RANK="))
    return found


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line.lower()]
    return lines[-1] if lines else "nothing was said"


def _wait(launch: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        launch.wait(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=3000, help="begin no further launch then")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory(prefix="snows-ranks-") as folder:
        launches = Launches(Path(folder), random.Random(given.seed))
        while launches.count < given.launches and time.monotonic() < end:
            launches.one()
            print(launches.summary(), flush=True)
    sys.exit(1 if launches.problems else 0)


if __name__ == "__main__":
    main()
