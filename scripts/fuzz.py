"""Throws damaged files and odd words at everything that reads input: a sentence may come out, a traceback never.

    python scripts/fuzz.py --cases 20000 --seconds 600 --seed 0

A case depends on the seed and its number alone: `--start NUMBER --cases 1` does one again. Exit status 1, with the
failing cases in a folder, if anything but success or an error on purpose comes out, if a case takes more than 20 s,
writes a file outside of its own folder, or if memory rises by more than 1 GiB.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
import snows
from snows.cli import main as cli
from snows.cli.request import Request, read_config, split_patterns
from snows.data import compact
from snows.data.preparation import prepare
from snows.data.sources import DataConfig, load_data
from snows.devices.memory import as_bytes
from snows.masks.given import given_masks
from snows.patterns import PatternRules
from snows.plan import make_plan
from snows.recipe import DEFAULT, Recipe
from snows.results import journal as state
from snows.results import storage
from snows.results.folder import CELLS, Folder

SECONDS_OF_A_CASE = 20
MEMORY = 1 << 30
_KEPT_FAILURES = 20

NUMBERS = [0, -1, 1, 2, 7, 255, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, 1e308, -0.0, 0.5]
NUMBERS += [float("nan"), float("inf"), True]
WORDS = ["", " ", "..", "../../x", "/", "\0", "a\0b", "\ud800", "Ω≈ç√", "🙂", "[", "*", "[!", "a" * 300, "a/" * 3000]
WORDS += ["%s%n", "{}", "$HOME", "~", "-1", "1e999", "nan", "9" * 5000, "٣:٤", "2:4", "4:2", "0.7", "0.7 erk min=1"]
WORDS += ["null", "true", "\n", "\ufeff", "*=2:4", "=", ",", ":", "::", "[[[[", "con", "module.", "weight"]
TYPES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "U16": 2, "U32": 4,
    "U64": 8, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8, "F4": 0.5, "Q3": 1,
}  # fmt: skip
NET = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

def x():
    return torch.randn(12, 8)

def broken():
    raise KeyError("x")
"""


@dataclass
class Case:
    """One case: its own random numbers and its own folder."""

    random: random.Random
    folder: Path
    world: World

    def write(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def spoil(self, content: bytes, other: bytes | None = None) -> bytes:
        return spoil_bytes(self.random, content, content if other is None else other)

    def fresh_model(self) -> nn.Module:
        return copy.deepcopy(self.world.model)

    def some_word(self) -> str:
        return self.random.choice(WORDS) if self.random.random() < 0.7 else spoil_text(self.random, "2:4")


@dataclass
class World:
    """What is whole, made once: networks, and the bytes of the files that are spoilt."""

    folder: Path
    model: nn.Module
    prepared: Any
    weights: bytes
    masks: bytes
    pickled: bytes
    result: dict[str, bytes]
    small_result: dict[str, bytes]
    journal: dict[str, bytes]
    images: list[bytes]
    npz: bytes
    settings: dict[str, Any] = field(default_factory=dict)


# Mutations


def spoil_bytes(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """A few flips, insertions, deletions, repetitions, cuts and splices."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice([1, 2, 8, 100]))
        kind = rng.randrange(8)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at:at] = rng.randbytes(rng.choice([1, 4, 50]))
        elif kind == 2:
            del data[at:end]
        elif kind == 3:
            data[at:at] = data[at:end]
        elif kind == 4:
            del data[at:]
        elif kind == 5:
            data[at:] = other[rng.randrange(len(other) + 1) :]
        elif kind == 6:
            data[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31 - 1, 2**40, 2**63, 2**64 - 1]))
        elif rng.random() < 0.1:
            data.clear()
    return bytes(data)


def spoil_text(rng: random.Random, text: str) -> str:
    """As bytes, or with an odd word or number where there was another one."""
    if rng.random() < 0.4:
        return spoil_bytes(rng, text.encode(), text.encode()).decode("utf-8", "surrogateescape")
    places = list(re.finditer(r"[\w.]+", text))
    for _ in range(rng.choice([1, 1, 2])):
        new = rng.choice(WORDS) if rng.random() < 0.5 else str(rng.choice(NUMBERS))
        start, end = rng.choice(places).span() if places else (0, 0)
        text = text[:start] + new + text[end:]
        places = list(re.finditer(r"[\w.]+", text))
    return text


def odd_value(rng: random.Random) -> Any:
    return rng.choice([None, {}, [], [[]], {"a": 1}, *NUMBERS, *WORDS])


def spoil_value(rng: random.Random, value: Any) -> Any:
    """The same JSON with something else somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        kind = rng.randrange(8)
        rest = {k: v for k, v in value.items() if k != key}
        if kind == 0:
            return rest
        if kind == 1:
            return {**rest, rng.choice(WORDS): value[key]}
        return {**value, key: spoil_value(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:at] if rng.random() < 0.5 else [*value, *value]
        return [*value[:at], spoil_value(rng, value[at]), *value[at + 1 :]]
    return odd_value(rng)


def spoil_json(rng: random.Random, text: str) -> bytes:
    if rng.random() < 0.3:
        return spoil_text(rng, text).encode("utf-8", "surrogatepass")
    if rng.random() < 0.02:
        return b'{"schema": ' + b"[" * 5000 + b"]" * 5000 + b"}"  # deeper than a parser goes
    return json.dumps(spoil_value(rng, json.loads(text))).encode("utf-8", "surrogatepass")


def split_safetensors(content: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def join_safetensors(header: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def spoil_safetensors(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """The file as bytes; its header; or a valid file of other names, types, shapes and notes."""
    kind = rng.random()
    if kind < 0.3:
        return spoil_bytes(rng, content, other)
    header, body = split_safetensors(content)
    if kind < 0.5:
        return join_safetensors(spoil_json(rng, json.dumps(header)), body)
    return rebuilt_safetensors(rng, header, body)


def rebuilt_safetensors(rng: random.Random, header: dict[str, Any], body: bytes) -> bytes:
    about = header.pop("__metadata__", {})
    tensors = {name: (e["dtype"], e["shape"], body[slice(*e["data_offsets"])]) for name, e in header.items()}
    for _ in range(rng.choice([0, 1, 1, 2])):
        name = rng.choice(list(tensors))
        kind, shape, raw = tensors[name]
        what = rng.randrange(5)
        if what == 0:
            del tensors[name]
            new = rng.choice([name + "_mask", name + "_orig", "module." + name, name.removesuffix(".weight"), *WORDS])
            tensors[new] = (kind, shape, raw)
        elif what == 1:
            kind = rng.choice(list(TYPES))
            count = int(TYPES[kind] * np.prod(shape, dtype=np.int64))
            tensors[name] = (kind, shape, (raw * (count // max(1, len(raw)) + 1))[:count])
        elif what == 2:
            flat = int(np.prod(shape, dtype=np.int64))
            tensors[name] = (kind, rng.choice([[flat], [1, flat], [flat, 1, 1], shape[::-1]]), raw)
        elif what == 3:
            tensors[name] = (kind, shape, bytes(rng.choice([0, 1, 255]) for _ in raw))
        elif len(tensors) > 1:
            del tensors[name]
    if about and rng.random() < 0.6:
        key = rng.choice(list(about))
        packed = about[key].startswith("{")
        about[key] = spoil_json(rng, about[key] if packed else '"x"').decode("utf-8", "replace")
    entries, at, rest = {}, 0, b""
    for name, (kind, shape, raw) in tensors.items():
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at, rest = at + len(raw), rest + raw
    words = json.dumps({"__metadata__": about, **entries} if about else entries)
    return join_safetensors(words.encode("utf-8", "surrogatepass"), rest)


def spoil_png(rng: random.Random, content: bytes) -> bytes:
    """Another width and height, with a checksum that is right: what a bomb looks like."""
    if content[:4] != b"\x89PNG" or rng.random() < 0.6:
        return spoil_bytes(rng, content, content)
    size = struct.pack(">II", *(rng.choice([0, 1, 20, 9000, 2**16, 2**31 - 1]) for _ in range(2)))
    head = b"IHDR" + size + content[24:29]
    return content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:]


# Targets


def weights_file(case: Case) -> None:
    path = case.write("w.safetensors", spoil_safetensors(case.random, case.world.weights, case.world.masks))
    storage.fill(case.fresh_model(), storage.read_state(path), str(path))


def masks_file(case: Case) -> None:
    whole = case.random.choice([case.world.masks, case.world.weights])
    path = case.write("m.safetensors", spoil_safetensors(case.random, whole, case.world.weights))
    world = case.world.prepared
    make_plan(world.graph, None, 1, masks=given_masks(path, world))


def pickle_file(case: Case) -> None:
    content = case.spoil(case.world.pickled)
    if case.random.random() < 0.5:  # a valid archive of a damaged pickle
        content = _rezipped(case.random, case.world.pickled)
    path = case.write("w.pt", content)
    storage.fill(case.fresh_model(), storage.read_state(path), str(path))


def result_folder(case: Case) -> None:
    """Loaded and verified; most with a manifest that says they are whole."""
    files = dict(case.random.choice([case.world.result, case.world.small_result]))
    name = case.random.choice(list(files))
    if name.endswith(".safetensors"):
        files[name] = spoil_safetensors(case.random, files[name], files[storage.MASKS])
    elif name.endswith(".json"):
        files[name] = spoil_json(case.random, files[name].decode())
    else:
        files[name] = case.spoil(files[name])
    if case.random.random() < 0.1:
        files.pop(case.random.choice(list(files)))
    place = case.folder / "result"
    for key, content in files.items():
        case.write(f"result/{key}", content)
    if name != storage.MANIFEST and case.random.random() < 0.8:
        facts = {path.name: storage.file_facts(path) for path in place.iterdir() if path.name != storage.MANIFEST}
        (place / storage.MANIFEST).write_text(storage.render_manifest(facts, {}), encoding="utf-8")
    _all_of(
        lambda: snows.verify(place, case.fresh_model()),
        lambda: snows.load(place, case.fresh_model()),
        lambda: snows.load(place),
        lambda: storage.refuse_existing(place, force=True),
    )


def compact_file(case: Case) -> None:
    whole = case.world.small_result[storage.COMPACT]
    path = case.write(storage.COMPACT, spoil_safetensors(case.random, whole, case.world.masks))
    storage.fill(case.fresh_model(), storage.read_state(path), str(path))


def packing(case: Case) -> None:
    """The words of a compact file by themselves, with tensors of other types."""
    tensors, about = storage.read_tensors(case.world.folder / "small" / storage.COMPACT)
    kinds = [torch.uint8, torch.int64, torch.float64, torch.complex64, torch.bool, torch.float32]
    for name in case.random.sample(list(tensors), case.random.choice([0, 0, 1])):
        tensors[name] = tensors[name].to(case.random.choice(kinds))
    words = spoil_json(case.random, about[compact.PACKED_MODEL]).decode("utf-8", "replace")
    storage._unpacked(Path("x"), tensors, {**about, compact.PACKED_MODEL: words})


def resume_folder(case: Case) -> None:
    files = dict(case.world.journal)
    name = case.random.choice(list(files))
    if name.endswith(".json"):
        files[name] = spoil_json(case.random, files[name].decode())
    else:
        content = spoil_safetensors(case.random, files.pop(name), case.world.weights)
        honest = case.random.random() < 0.8  # a name that says it is whole
        files[name if not honest else name.rpartition("-")[0] + f"-{state._digest(content)}.safetensors"] = content
    for key, content in files.items():
        case.write(f"resume/{key}", content)
    journal = state.DiskJournal(case.folder / "resume", case.world.settings, torch.device("cpu"))
    journal.recall_choice(0)
    for index in range(4):
        journal.recall(0, index)


def comparison_folder(case: Case) -> None:
    settings: Any = {
        "weights": "ab",
        "samples": 12,
        "recipe": {"sweeps": 1},
        "layers": None,
        "versions": {"torch": "2"},
    }
    case.write("cells/settings.json", spoil_json(case.random, json.dumps(settings)))
    case.write(f"cells/{CELLS}/a.json", spoil_json(case.random, '{"mask": "magnitude", "seconds": 1.5}'))
    folder = Folder(case.folder / "cells", settings)
    _all_of(folder.check, lambda: folder.cell("a.json"))


def npz_file(case: Case) -> None:
    rng = case.random
    arrays: dict[str, Any] = {"x": np.zeros((4, 6, 6, 3), np.uint8), "y": np.arange(4)}
    if rng.random() < 0.5:
        images = [image for image in case.world.images if image[:2] == b"\xff\xd8"]
        pieces = [spoil_bytes(rng, image, image) if rng.random() < 0.2 else image for image in images]
        offsets = np.cumsum([0, *map(len, pieces)])
        if rng.random() < 0.4:
            offsets[rng.randrange(len(offsets))] = rng.choice([-1, 0, 2**31, 2**62, 5])
        arrays = {"jpeg": np.frombuffer(b"".join(pieces), np.uint8), "offsets": offsets}
    if rng.random() < 0.5:
        key = rng.choice(list(arrays))
        kinds: list[Any] = [np.float16, np.uint16, np.uint64, np.int8, ">f4", "U3", "M8[s]", np.complex64, bool, "V3"]
        arrays[key] = np.zeros(rng.choice([(), (0,), (4,), (4, 0, 3), (4, 6, 6, 5)]), rng.choice(kinds))
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    content = stream.getvalue()
    kind = rng.random()
    content = content if kind < 0.3 else case.spoil(content) if kind < 0.6 else _rezipped(rng, content)
    path = case.write("x.npz", content)
    load_data(f"npz:{path}", rng.choice([1, 3, 1000]), config=DataConfig((0.5,), (0.5,)))


def image_folder(case: Case) -> None:
    rng = case.random
    for index in range(rng.choice([1, 2])):
        image = rng.choice(case.world.images)
        content = image if rng.random() < 0.2 else spoil_png(rng, image)
        suffix = rng.choice(["png", "jpg", "bmp", "tif", "webp", "ppm"])
        case.write(f"images/{rng.choice('ab')}/{index}.{suffix}", content)
    load_data(f"folder:{case.folder / 'images'}", 4, config=DataConfig(size=rng.choice([1, 8, 32])))


def config_file(case: Case) -> None:
    whole = '[data]\nmean = [0.5, 0.5]\nstd = 0.25\nsize = 32\n[recipe]\nsweeps = 2\nhorizon = "auto"\nridge = 1e-6\n'
    text = spoil_text(case.random, whole) if case.random.random() < 0.98 else "x = " + "[" * 5000
    path = case.write("c.toml", text.encode("utf-8", "surrogatepass"))
    read = Request("m", None, None, 1, 0, "cpu", True, read_config(path))
    _all_of(read.data_config, lambda: read.recipe("default"))


def recipe_file(case: Case) -> None:
    content = spoil_json(case.random, DEFAULT.to_json())
    name = str(case.write("r.json", content))
    _all_of(
        lambda: Recipe.from_json(content.decode("utf-8", "replace")),
        lambda: Request("m", None, None, 1, 0, "cpu", True).recipe(name),
    )


def pattern_text(case: Case) -> None:
    whole = case.random.choice(["2:4", "0.7", "0.7 erk", "0.7 measured flops max=0.9 min=0.1", "1:4, 2=2:4, 4=dense"])
    text = spoil_text(case.random, whole)
    graph = case.world.prepared.graph
    _all_of(
        lambda: make_plan(graph, PatternRules.parse(text), 2),
        lambda: PatternRules.parse(odd_value(case.random)),
        lambda: PatternRules.parse({odd: odd_value(case.random) for odd in ("*", case.some_word())}),
        lambda: split_patterns([text]),
    )


def layer_globs(case: Case) -> None:
    def given() -> Any:
        text = spoil_text(case.random, "0,2,*4")
        return case.random.choice([None, text, case.some_word(), [text], [case.some_word(), "2"], [1, None]])

    make_plan(case.world.prepared.graph, PatternRules.parse("2:4"), 2, given(), given())


def memory_text(case: Case) -> None:
    rng = case.random
    sizes = ["24GiB", "800 MB", "1e9", "1.5k", "9" * rng.choice([1, 20, 400]), case.some_word(), odd_value(rng)]
    word = rng.choice(sizes)
    as_bytes(word + rng.choice(["", "B", "GiB", "e99", " "]) if isinstance(word, str) else word)


def command_line(case: Case) -> None:
    """The flags of every command. Where the work would begin, it stops."""
    rng = case.random
    case.write("net.py", NET.encode())
    case.write("w.safetensors", spoil_safetensors(rng, case.world.weights, case.world.masks))
    case.write("c.toml", b"[data]\nsize = 8\n")
    command = rng.choice(["prune", "prune", "inspect", "evaluate", "compare", "verify", case.some_word()])
    words = [command, rng.choice(["net.py:model", "net.py:model", "net.py:broken", "torchvision:x", case.some_word()])]
    case.write("x.npz", case.world.npz)
    words += ["--data", rng.choice(["net.py:x", "npz:x.npz", "folder:.", "net.py:broken", f"npz:{case.some_word()}"])]
    for flag in rng.sample(list(_FLAGS), rng.choice([0, 1, 2, 4])):
        words.append(flag)
        if _FLAGS[flag]:
            fitting = rng.random() < 0.4
            words.append(rng.choice(_FLAGS[flag]) if fitting else rng.choice([case.some_word(), str(odd_value(rng))]))
    if rng.random() < 0.1:
        rng.shuffle(words)
    _run_command([word.replace("\0", "?") for word in words], case.folder)  # no system hands a NUL on


_FLAGS: dict[str, list[str]] = {
    "--weights": ["w.safetensors"], "--pattern": ["2:4", "0.7"], "--mask": ["wanda", "w.safetensors"],
    "--horizon": ["3"], "--layers": ["2"], "--exclude": ["2"], "--recipe": ["paper"], "--samples": ["4"],
    "--labels": ["given"], "--permute": [], "--out": ["out"], "--compact": [], "--force": [], "--resume": ["state"],
    "--device": ["cpu", "meta", "cuda:99", "mps"], "--seed": ["1", "-1", str(2**70)], "--json": [], "--quiet": [],
    "--config": ["c.toml"], "--memory": ["1GiB"], "--pruned": ["x"], "--model": ["net.py:model"], "--markdown": [],
    "--help": [], "--version": [], "--debug": [], "--unknown": ["x"],
}  # fmt: skip

TARGETS: dict[Callable[[Case], None], int] = {
    weights_file: 4, masks_file: 4, pickle_file: 4, result_folder: 2, compact_file: 4, packing: 3, resume_folder: 3,
    comparison_folder: 3, npz_file: 3, image_folder: 2, config_file: 4, recipe_file: 4, pattern_text: 4,
    layer_globs: 4, memory_text: 2, command_line: 6,
}  # fmt: skip


def _all_of(*steps: Callable[[], Any]) -> None:
    """Each, whether or not those before were refused."""
    refusal = None
    for step in steps:
        try:
            step()
        except snows.SnowsError as error:
            refusal = error if refusal is None or str(refusal).strip() else refusal
    if refusal is not None:
        raise refusal


def _rezipped(rng: random.Random, content: bytes) -> bytes:
    """A zip archive with right checksums and one damaged, renamed or missing member."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    at = rng.randrange(len(members))
    name, inside = members[at]
    what = rng.randrange(6)
    if what == 0:
        del members[at]
    elif what == 1:
        members[at] = (rng.choice(["../x.npy", "x", "jpeg.npy", "y.npy", "a" * 300]), inside)
    elif what == 2 and b"'shape': (" in inside:
        shape = rng.choice([b"'shape': (2000000000, 9, 9, 9", b"'shape': (-1", b"'shape': (True", b"'shape': (9**9"])
        members[at] = (name, re.sub(rb"'shape': \([\d, ]*", shape, inside))
    else:
        members[at] = (name, spoil_bytes(rng, inside, content))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for key, value in members:
            archive.writestr(key, value)
    return stream.getvalue()


def _run_command(words: list[str], folder: Path) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise snows.InputError("the work would begin here")

    places = [
        "api.prune",
        "evaluation.comparison.compare",
        "evaluation.classes.evaluate",
        "evaluation.inspection.inspect",
    ]
    before = Path.cwd()
    show = warnings.showwarning
    os.chdir(folder)
    patches = [mock.patch(f"snows.{place}", stop) for place in places] + [mock.patch.object(sys, "argv", ["s", *words])]
    try:
        for patch in patches:
            patch.start()
        with redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")) as out, redirect_stderr(io.StringIO()):
            cli.main()
            out.flush()
    except SystemExit as ended:
        if ended.code not in (None, 0, 1, 2):
            raise RuntimeError(f"exit status {ended.code}") from ended
        if ended.code:
            raise snows.InputError(f"exit status {ended.code}") from ended
    finally:
        for patch in patches:
            patch.stop()
        warnings.showwarning = show
        os.chdir(before)


# The world


def make_world(folder: Path) -> World:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    samples = torch.randn(12, 8)
    resume = folder / "resume"
    light = DEFAULT.replace(sweeps=1, cg_steps=2, horizon=1)
    result = snows.prune(model, samples, "2:4", recipe=light, progress=False, resume=resume)
    result.save(folder / "dense")
    result.save(folder / "small", compact=True)
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    masks = {"2.weight": torch.rand(8, 8) > 0.5}
    return World(
        folder, model, prepare(model, samples, None, 0, False), save(dict(model.state_dict()), {"format": "pt"}),
        save(masks), stream.getvalue(), _files(folder / "dense"), _files(folder / "small"), _files(resume), _images(),
        _npz(), json.loads((resume / "settings.json").read_text(encoding="utf-8")),
    )  # fmt: skip


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _npz() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, x=np.ones((12, 8), np.float32), y=np.arange(12))
    return stream.getvalue()


def _images() -> list[bytes]:
    """Each kind of pixel that a PNG or JPEG may have, and a few other formats."""
    pixels = np.random.default_rng(0).integers(0, 255, (9, 12, 4), np.uint8)
    color, gray = Image.fromarray(pixels[..., :3]), Image.fromarray(pixels[..., 0])
    deep = Image.fromarray(pixels[..., 0].astype(np.uint16) * 256)
    saved = []
    for image, kind in (
        (color, "JPEG"), (gray, "JPEG"), (color.convert("CMYK"), "JPEG"), (color, "PNG"), (gray, "PNG"), (deep, "PNG"),
        (color.convert("P"), "PNG"), (Image.fromarray(pixels), "PNG"), (gray.convert("1"), "PNG"), (color, "BMP"),
        (color, "TIFF"), (gray.convert("F"), "TIFF"), (gray.convert("LA"), "PNG"), (color, "PPM"), (color, "WEBP"),
    ):  # fmt: skip
        stream = io.BytesIO()
        image.save(stream, kind)
        saved.append(stream.getvalue())
    return saved


# The run


class TooSlow(BaseException):
    """Not an Exception, which a reader of untrusted files may well catch."""


@dataclass
class Fuzz:
    """All cases of one run."""

    folder: Path
    failures: Path
    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    failed: dict[str, int] = field(default_factory=dict)  # what went wrong, and how often

    def __post_init__(self) -> None:
        for name in ("world", "cases"):
            (self.folder / name).mkdir(parents=True)
        self.world = make_world(self.folder / "world")
        self.memory = _memory()
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
        if problem is None and _memory() - self.memory > MEMORY:
            problem = f"memory rose by {(_memory() - self.memory) / 2**20:.0f} MiB"
            self.memory = _memory()
        if problem is not None:
            self._keep(name, seed, number, place, problem)
        shutil.rmtree(place)

    def _try(self, target: Callable[[Case], None], case: Case) -> str | None:
        """What is wrong, or None."""
        try:
            with warnings.catch_warnings(), _time_limit(), torch.random.fork_rng():
                warnings.simplefilter("ignore")
                target(case)
        except snows.SnowsError as error:
            self.refused[target.__name__] += 1
            return None if str(error).strip() else f"{type(error).__name__} without a sentence"
        except TooSlow:
            return f"took more than {SECONDS_OF_A_CASE} s\n{traceback.format_exc()}"
        except Exception:
            return traceback.format_exc()
        return None

    def _keep(self, name: str, seed: int, number: int, place: Path, problem: str) -> None:
        """The first of each kind is written down: by the target and the line of ours that raised."""
        frames = re.findall(r'File ".*?(\w+\.py)", line (\d+)', problem)
        ours = [frame for frame in frames if (Path(snows.__file__).parent / frame[0]).exists()]
        kind = f"{name} {':'.join(ours[-1]) if ours else ''} {problem.strip().splitlines()[-1][:200]}"
        key = re.sub(r"\d+", "#", kind.partition(": ")[0])
        self.failed[key] = self.failed.get(key, 0) + 1
        if self.failed[key] > 1 or len(self.failed) > _KEPT_FAILURES:
            return
        kept = self.failures / f"{name}-{seed}-{number}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(place, kept)
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
    if not text.startswith((str(_WATCHED[-1].folder), str(_WATCHED[-1].failures), "/dev/")):
        _WATCHED[-1].outside.append(f"{event} {text}")


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def _time_limit() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS_OF_A_CASE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def fuzzing(failures: Path) -> Iterator[Fuzz]:
    """A fuzz in a temporary folder, with an eye on every file that is written."""
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    with tempfile.TemporaryDirectory(prefix="snows-fuzz-") as folder:
        fuzz = Fuzz(Path(folder).resolve(), failures.resolve())
        _WATCHED.append(fuzz)
        try:
            yield fuzz
        finally:
            _WATCHED.pop()
            sys.dont_write_bytecode = before


sys.addaudithook(_watch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20000)
    parser.add_argument("--seconds", type=float, default=600, help="stop then, whatever is left")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", choices=sorted(target.__name__ for target in TARGETS), help="one target")
    parser.add_argument("--failures", type=Path, default=Path(tempfile.gettempdir()) / "snows-fuzz-failures")
    given = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    with fuzzing(given.failures) as fuzz:
        end = time.monotonic() + given.seconds
        for number in range(given.start, given.start + given.cases):
            if time.monotonic() > end:
                break
            fuzz.run(given.seed, number, given.only)
    print(fuzz.summary())
    sys.exit(1 if fuzz.failed else 0)


if __name__ == "__main__":
    main()
