"""Many small prunes in one process: does anything grow?

    python scripts/soak.py --prunes 200

Random networks, patterns, masks and options. Fails if memory grows by more than 150 MiB after the first 50, if file
handles grow, or if a prune ends with anything but a result or an error on purpose.

Some growth is torch's: with torch 2.13 every torch.export.export with dynamic shapes leaves a ShapeEnv behind, 0.1 MiB
for the smallest network, also in a loop without snows.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1]))
import snows
from snows.masks import NAMES
from snows.recipe import DEFAULT
from tests.networks import NETWORKS, example, make

WARM_UP, EVERY = 50, 20
MEMORY_MIB = 150
PATTERNS = ["2:4", "1:4", "1:2", 0.5, "0.7", "0.6 erk", "0.6 lamp", "0.5 uniform", "0.5 measured", "0.5 owl max=0.9"]


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def prune_something(rng: random.Random, folder: Path) -> str:
    """One prune of random choices, some of them saved and loaded again. How it ended."""
    torch.manual_seed(rng.randrange(1000))
    name = rng.choice(list(NETWORKS))
    model, pattern, mask = make(name), rng.choice(PATTERNS), rng.choice([*NAMES, "given"])
    options: dict[str, Any] = {"mask": mask, "seed": rng.randrange(1000), "horizon": rng.choice([0, 1, 2])}
    if mask == "given":
        options["mask"] = {key: weight != 0 for key, weight in model.named_parameters() if weight.ndim > 1}
        options["mask"] = {key: torch.rand_like(kept, dtype=torch.float) < 0.5 for key, kept in options["mask"].items()}
    if rng.random() < 0.2:
        options["resume"] = folder / "resume"
    if rng.random() < 0.1:
        options["solver"] = None
    if rng.random() < 0.1:
        options["permute"] = True
    recipe = DEFAULT.replace(sweeps=rng.choice([1, 2]), cg_steps=3, minibatch=rng.choice([None, None, 8]))
    try:
        result = snows.prune(
            model, example(name, rng.choice([8, 16])), pattern, recipe=recipe, progress=False, **options
        )
        if rng.random() < 0.3:
            result.save(folder / "result", compact=rng.random() < 0.5)
            snows.load(folder / "result", model)
            found = snows.verify(folder / "result", model)
            if not found.ok:
                raise RuntimeError(f"{name}, {mask}, {pattern}: {found.findings[0]}")
    except snows.SnowsError:
        return "refused"
    return "done"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prunes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=1, help="number of the first prune")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ended: Counter[str] = Counter()
    before: tuple[float, int] | None = None
    began = time.perf_counter()
    for number in range(given.start, given.start + given.prunes):
        with tempfile.TemporaryDirectory(prefix="snows-soak-") as folder:
            try:
                ended[prune_something(random.Random(f"{given.seed}:{number}"), Path(folder))] += 1
            except Exception:
                ended["failed"] += 1
                print(f"prune {number} failed:\n{traceback.format_exc()}", flush=True)
        done = number - given.start + 1
        if done == min(WARM_UP, given.prunes):
            before = rss_mib(), handles()
        if done % EVERY == 0 or done == given.prunes:
            print(
                f"{done:5} prunes {time.perf_counter() - began:6.0f} s  {rss_mib():6.0f} MiB  {handles()} handles  "
                f"{threading.active_count()} threads, {len(os.listdir('/proc/self/task'))} in all  {dict(ended)}",
                flush=True,
            )
    assert before is not None
    problems = [f"{ended['failed']} prunes failed"] if ended["failed"] else []
    if (grown := rss_mib() - before[0]) > MEMORY_MIB:
        problems.append(f"memory grew by {grown:.0f} MiB after the first {WARM_UP}")
    if (more := handles() - before[1]) > 0:
        problems.append(f"{more} file handles more than after the first {WARM_UP}")
    print("; ".join(problems) or f"nothing grew (memory by {grown:.0f} MiB after the first {WARM_UP})")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
