"""Every table and figure of the paper, from one command each.

    python -m paper                    # the entries, what each needs, and what is done
    python -m paper horizon nm         # measure these; rows that are done are skipped
    python -m paper nm --jobs 6        # six rows at once on one GPU: for accuracy, as such rows have no time or memory
    python -m paper --quick            # all of them, scaled down, on the embedded network: minutes on a laptop
    python -m paper page               # write docs/paper.md's tables and figures from the results

Run from the folder `benchmarks`. Results go to benchmarks/results/paper, one JSON file an entry, written after every
row; figures to docs/paper. `make paper` and `make paper-quick` call this.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from sections import measure_rows

from . import page
from .entries import ENTRIES
from .setting import Setting

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
_CPU_BYTES = 8 << 30
RESULTS = ROOT / "benchmarks" / "results" / "paper"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entries", nargs="*", help=f"of: {', '.join(ENTRIES)}, page")
    parser.add_argument("--quick", action="store_true", help="scaled down, on the embedded network")
    parser.add_argument(
        "--shared", type=Path, default=ROOT.parent / "shared", help="folder with data/ and checkpoints/"
    )
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/paper, with --quick build/paper-quick")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the rows and the device")
    parser.add_argument("--memory", help="of the device, for each of them (default: an equal share)")
    options = parser.parse_args()
    unknown = sorted({*options.entries} - {*ENTRIES, "page"})
    if unknown:
        parser.error(f"{', '.join(unknown)}: no such entry; there are {', '.join(ENTRIES)}, page")
    out = options.out or (ROOT / "build" / "paper-quick" if options.quick else RESULTS)
    if options.entries == ["page"]:
        page.write(RESULTS, ROOT / "docs")
    elif options.entries or options.quick:
        setting = Setting(options.shared, options.device, options.quick, options.memory)
        if options.jobs > 1 and options.memory is None:
            raise SystemExit(at_once(options.jobs, setting))
        measure(setting, options.entries or list(ENTRIES), out)
    else:
        show(out)


def show(out: Path) -> None:
    print(f"{'entry':14}{'rows done':>10}{'minutes':>9}{'GiB':>5}  what it is")
    for name, entry in ENTRIES.items():
        path = out / f"{name}.json"
        done = len(json.loads(path.read_text())["rows"]) if path.exists() else 0
        print(f"{name:14}{done:>10}{entry.minutes:>9g}{entry.gib:>5g}  {entry.title}")
    print("minutes and GiB: about, on one H200")


def at_once(jobs: int, setting: Setting) -> int:
    """This command in several processes, each with a share of the device."""
    memory = (torch.cuda.mem_get_info()[0] if setting.device == "cuda" else _CPU_BYTES) // jobs
    command = [sys.executable, "-m", "paper", *sys.argv[1:], "--memory", str(memory)]
    threads = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    workers = [subprocess.Popen(command, env=threads) for _ in range(jobs)]
    return max(worker.wait() for worker in workers)


def measure(setting: Setting, names: list[str], out: Path) -> None:
    for name in names:
        entry, began = ENTRIES[name], time.perf_counter()
        print(f"{name}: {entry.title}", flush=True)
        rows = measure_rows(entry.rows(setting), out / f"{name}.json", setting.device)
        for figure, drawing in (entry.draw(rows) if entry.draw and rows else {}).items():
            (out / f"{figure}.svg").write_text(drawing)
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
