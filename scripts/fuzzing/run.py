"""The run of a fuzz: cases one after another, watched for errors, time, memory and files elsewhere."""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import snows

from .classes import TARGETS
from .targets import require_printable
from .world import Case, make_world

_KEPT_FAILURES = 20
_WAITING, _ALL = 0.005, 0.9  # shares of a case's time


class TooSlow(BaseException):
    """Not an Exception, which a reader of untrusted files may well catch."""


@dataclass
class Fuzz:
    """All cases of one run."""

    folder: Path
    failures: Path
    seconds_of_a_case: int = 20
    most_memory: int = 1 << 30  # bytes that the process may grow by
    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    failed: dict[str, int] = field(default_factory=dict)  # what went wrong, and how often

    def __post_init__(self) -> None:
        for name in ("world", "cases"):
            (self.folder / name).mkdir(parents=True)
        self.world = make_world(self.folder / "world")
        self.memory = _memory(afresh=True)
        self.outside: list[str] = []

    def run(self, seed: int, number: int, only: str | None = None) -> None:
        rng = random.Random(f"{seed}:{number}")
        named = {target.__name__: target for target in TARGETS}
        target = named[only] if only else rng.choices(list(TARGETS), list(TARGETS.values()))[0]
        place = self.folder / "cases" / str(number)
        place.mkdir()
        case, name = Case(rng, place, self.world), target.__name__
        self.outside.clear()
        began = time.perf_counter()
        problem = self._try(target, case)
        self.counts[name] += 1
        self.seconds[name] += time.perf_counter() - began  # type: ignore[assignment]  # a sum all the same
        if problem is None and self.outside:
            problem = f"wrote outside of its folder: {self.outside[0]}"
        if problem is None and _memory() - self.memory > self.most_memory:
            problem = f"memory rose by {(_memory() - self.memory) / 2**20:.0f} MiB"
            self.memory = _memory()
        if problem is not None:
            self._keep(name, seed, number, place, problem)
        _remove(place)

    def _try(self, target: Callable[[Case], None], case: Case) -> str | None:
        """What is wrong, or None."""
        try:
            with warnings.catch_warnings(), time_limit(self.seconds_of_a_case), torch.random.fork_rng():
                warnings.simplefilter("ignore")
                target(case)
        except snows.SnowsError as error:
            self.refused[target.__name__] += 1
            try:
                require_printable(str(error))
            except RuntimeError as problem:
                return str(problem)
            return None if str(error).strip() else f"{type(error).__name__} without a sentence"
        except TooSlow:
            return f"took more than {self.seconds_of_a_case} s\n{traceback.format_exc()}"
        except Exception:
            return traceback.format_exc()
        return None

    def _keep(self, name: str, seed: int, number: int, place: Path, problem: str) -> None:
        """The first of each kind is written down: by the target and the line of ours that raised."""
        ours = re.findall(rf'File "{re.escape(str(Path(snows.__file__).parent))}/(.*?)", line (\d+)', problem)
        kind = f"{name} {':'.join(ours[-1]) if ours else ''} {problem.strip().splitlines()[-1][:200]}"
        key = re.sub(r"\d+", "#", kind.partition(": ")[0])
        self.failed[key] = self.failed.get(key, 0) + 1
        if self.failed[key] > 1 or len(self.failed) > _KEPT_FAILURES:
            return
        kept = self.failures / f"{name}-{seed}-{number}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(place, kept, symlinks=True, ignore=_no_files)
        (kept / "problem.txt").write_text(problem, encoding="utf-8", errors="backslashreplace")
        sentence = f"FAILED {kind} (case {number}, kept in {kept})"
        print(sentence.encode("utf-8", "backslashreplace").decode(), flush=True)

    def summary(self) -> str:
        rows = [f"{'target':<20}{'cases':>8}{'refused':>9}{'seconds':>9}"]
        for name in sorted(self.counts):
            rows.append(f"{name:<20}{self.counts[name]:>8}{self.refused[name]:>9}{self.seconds[name]:>9.1f}")
        rose = (_memory() - self.memory) / 2**20
        rows.append(
            f"{sum(self.counts.values())} cases, {sum(self.failed.values())} failures of {len(self.failed)} kinds"
        )
        return "\n".join([*rows, f"memory rose by {rose:.0f} MiB"])


_WATCHED: list[Fuzz] = []  # whose folder the cases stay in; empty while none runs


def _watch(event: str, args: tuple[Any, ...]) -> None:
    """Every file that is opened for writing or made by this process."""
    if not _WATCHED or event not in ("open", "os.mkdir", "os.rename"):
        return
    path = args[1] if event == "os.rename" else args[0]
    if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
        return
    if isinstance(path, int):
        return
    text = os.path.abspath(os.fsdecode(path))
    if not text.startswith((str(_WATCHED[-1].folder), str(_WATCHED[-1].failures), "/dev/", "/proc")):
        _WATCHED[-1].outside.append(f"{event} {text}")


def _remove(place: Path) -> None:
    """All of it, folders without permission included."""
    for folder, inside, _ in os.walk(place):
        for name in inside:
            path = Path(folder) / name
            if not path.is_symlink():
                path.chmod(0o700)
    shutil.rmtree(place)


def _memory(afresh: bool = False) -> int:
    """The most bytes that this process has held; since the last call `afresh`, where the system can tell."""
    try:
        if afresh:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.findall(r"VmHWM:\s*(\d+)", status)[0])
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _no_files(folder: str, names: list[str]) -> list[str]:
    """What cannot be copied: FIFOs and sockets, huge files, and what may not be read."""
    paths = {name: Path(folder) / name for name in names}
    return [
        name
        for name, path in paths.items()
        if not path.is_symlink() and not path.is_dir() and not (path.is_file() and path.stat().st_size < 1 << 24)
    ]


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Of the processor's time, as the machine may be busy. Whoever uses none of it waits for something."""
    began = last = time.process_time()
    over = False

    def ring(*_: Any) -> None:
        nonlocal last
        if over:
            return
        signal.setitimer(signal.ITIMER_REAL, seconds)  # again, for those who take TooSlow for an error of a file
        used, last = time.process_time() - last, time.process_time()
        if used < _WAITING * seconds or last - began > _ALL * seconds:
            raise TooSlow

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        over = True  # from here on an alarm raises nothing, and the next lines are all run
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def fuzzing(failures: Path, **limits: int) -> Iterator[Fuzz]:
    """A fuzz in a temporary folder, with an eye on every file that is written."""
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    with tempfile.TemporaryDirectory(prefix="snows-fuzz-") as folder:
        fuzz = Fuzz(Path(folder).resolve(), failures.resolve(), **limits)
        _WATCHED.append(fuzz)
        tempfile.tempdir, elsewhere = str(fuzz.folder), tempfile.tempdir  # where rescued results go
        try:
            yield fuzz
        finally:
            _WATCHED.pop()
            tempfile.tempdir = elsewhere
            sys.dont_write_bytecode = before


sys.addaudithook(_watch)
