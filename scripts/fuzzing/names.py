"""Names with escape codes, wherever a name may stand."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import numpy as np
import torch
from safetensors.torch import save

from snows.results import manifest

from .commands import run_command
from .mutations import WORDS
from .world import Case

EVIL = ["\x1b]0;owned\x07", "\x1b[2J\x1b[1;1H", "\r\x1b[K", "\x9b31m", "\u202e", "\0", "\x7f"]
EVIL += ["a\nout is as it was written"]


def names_with_escape_codes(case: Case) -> None:
    """In tensors, arrays, folders and reports: the command's words must be text that a terminal only shows."""
    rng = case.random
    evil = "".join(rng.choice(["w", "2.weight", rng.choice(WORDS)[:50], *EVIL]) for _ in range(3)) + rng.choice(EVIL)
    name = evil.encode("utf-8", "replace").decode()
    case.write("w.safetensors", save({name: torch.ones(2)}))
    stream = io.BytesIO()
    np.savez(stream, **{name.replace("/", "_").replace("\0", "") or "x": np.ones(2)})
    case.write("x.npz", stream.getvalue())
    file = name.replace("/", "_").replace("\0", "")[:60] or "x"
    report = json.loads(case.world.result["report.json"])
    report["layers"][0][rng.choice(["parameter", "pattern", "name"])] = evil
    report["source"] = evil
    files = {**case.world.result, "report.json": json.dumps(report).encode(), file: b""}
    for key, content in files.items():
        case.write(f"out/{key}", content)
    case.write("c.toml", f"[recipe]\n{json.dumps(name)} = 1".encode("utf-8", "replace"))
    facts = {
        key: manifest.file_facts(case.folder / "out" / key) for key in case.world.result if key != manifest.MANIFEST
    }
    (case.folder / "out" / manifest.MANIFEST).write_text(manifest.render_manifest(facts, {}), encoding="utf-8")
    case.write("net.py", NET)
    prune = ["prune", "net.py:model", "--data"]
    words = rng.choice([
        ["verify", "out"], ["verify", file], [*prune, "npz:x.npz"], [*prune, f"folder:{file}"],
        [*prune, "npz:x.npz", "--weights", "w.safetensors"], [*prune, "npz:x.npz", "--mask", "w.safetensors"],
        [*prune, "npz:x.npz", "--config", rng.choice(["c.toml", file])],
        [*prune, "npz:x.npz", "--recipe", f"{file}.json"],
        [file], ["prune", f"--{file}"], ["inspect", file],
    ])  # fmt: skip
    run_command(words, case.folder)


NET = b"""
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
"""


TARGETS: dict[Callable[[Case], None], int] = {names_with_escape_codes: 3}
