"""What reads input: each target spoils something and has it read."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import snows
from snows.cli.request import Request, read_config, split_patterns
from snows.data import compact, weights
from snows.data.sources import DataConfig, load_data
from snows.devices.memory import as_bytes
from snows.masks.given import given_masks
from snows.patterns import PatternRules
from snows.plan import make_plan
from snows.recipe import DEFAULT, Recipe
from snows.results import journal, manifest, storage
from snows.results.folder import CELLS, Folder

from .mutations import (
    odd_value,
    rezipped,
    spoil_bytes,
    spoil_json,
    spoil_png,
    spoil_safetensors,
    spoil_text,
)
from .world import Case


def weights_file(case: Case) -> None:
    path = case.write("w.safetensors", spoil_safetensors(case.random, case.world.weights, case.world.masks))
    weights.fill(case.fresh_model(), weights.read_state(path), str(path))


def masks_file(case: Case) -> None:
    whole = case.random.choice([case.world.masks, case.world.weights])
    path = case.write("m.safetensors", spoil_safetensors(case.random, whole, case.world.weights))
    world = case.world.prepared
    make_plan(world.graph, None, 1, masks=given_masks(path, world))


def pickle_file(case: Case) -> None:
    content = case.spoil(case.world.pickled)
    if case.random.random() < 0.5:  # a valid archive of a damaged pickle
        content = rezipped(case.random, case.world.pickled)
    path = case.write("w.pt", content)
    weights.fill(case.fresh_model(), weights.read_state(path), str(path))


def result_folder(case: Case) -> None:
    """Loaded and verified; most with a manifest that says they are whole."""
    files = dict(case.random.choice([case.world.result, case.world.small_result]))
    name = case.random.choice(list(files))
    if name.endswith(".safetensors"):
        files[name] = spoil_safetensors(case.random, files[name], files[manifest.MASKS])
    elif name.endswith(".json"):
        files[name] = spoil_json(case.random, files[name].decode())
    else:
        files[name] = case.spoil(files[name])
    if case.random.random() < 0.1:
        files.pop(case.random.choice(list(files)))
    place = case.folder / "result"
    for key, content in files.items():
        case.write(f"result/{key}", content)
    if name != manifest.MANIFEST and case.random.random() < 0.8:
        facts = {path.name: manifest.file_facts(path) for path in place.iterdir() if path.name != manifest.MANIFEST}
        (place / manifest.MANIFEST).write_text(manifest.render_manifest(facts, {}), encoding="utf-8")
    all_of(
        lambda: snows.verify(place, case.fresh_model()),
        lambda: snows.load(place, case.fresh_model()),
        lambda: snows.load(place),
        lambda: storage.refuse_existing(place, force=True),
    )


def compact_file(case: Case) -> None:
    whole = case.world.small_result[manifest.COMPACT]
    path = case.write(manifest.COMPACT, spoil_safetensors(case.random, whole, case.world.masks))
    weights.fill(case.fresh_model(), weights.read_state(path), str(path))


def packing(case: Case) -> None:
    """The words of a compact file by themselves, with tensors of other types."""
    tensors, about = weights.read_tensors(case.world.folder / "small" / manifest.COMPACT)
    kinds = [torch.uint8, torch.int64, torch.float64, torch.complex64, torch.bool, torch.float32]
    for name in case.random.sample(list(tensors), case.random.choice([0, 0, 1])):
        tensors[name] = tensors[name].to(case.random.choice(kinds))
    words = spoil_json(case.random, about[compact.PACKED_MODEL]).decode("utf-8", "replace")
    weights._unpacked(Path("x"), tensors, {**about, compact.PACKED_MODEL: words})


def resume_folder(case: Case) -> None:
    files = dict(case.world.journal)
    name = case.random.choice(list(files))
    if name.endswith(".json"):
        files[name] = spoil_json(case.random, files[name].decode())
    else:
        content = spoil_safetensors(case.random, files.pop(name), case.world.weights)
        honest = case.random.random() < 0.8  # a name that says it is whole
        place = name.rpartition("-")[0]
        digest = journal.digest_for(case.world.settings, place.removeprefix("layers/"), content)
        files[f"{place}-{digest}.safetensors" if honest else name] = content
    for key, content in files.items():
        case.write(f"resume/{key}", content)
    found = journal.DiskJournal(case.folder / "resume", case.world.settings, torch.device("cpu"))
    found.recall_choice(0)
    for index in range(4):
        found.recall(0, index)


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
    all_of(folder.check, lambda: folder.cell("a.json"))


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
    content = content if kind < 0.3 else case.spoil(content) if kind < 0.6 else rezipped(rng, content)
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
    all_of(read.data_config, lambda: read.recipe("default", None))


def recipe_file(case: Case) -> None:
    content = spoil_json(case.random, DEFAULT.to_json())
    name = str(case.write("r.json", content))
    all_of(
        lambda: Recipe.from_json(content.decode("utf-8", "replace")),
        lambda: Request("m", None, None, 1, 0, "cpu", True).recipe(name, None),
    )


def pattern_text(case: Case) -> None:
    whole = case.random.choice(["2:4", "0.7", "0.7 erk", "0.7 measured flops max=0.9 min=0.1", "1:4, 2=2:4, 4=dense"])
    text = spoil_text(case.random, whole)
    graph = case.world.prepared.graph
    all_of(
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


TARGETS: dict[Callable[[Case], None], int] = {
    weights_file: 4, masks_file: 4, pickle_file: 4, result_folder: 2, compact_file: 4, packing: 3, resume_folder: 3,
    comparison_folder: 3, npz_file: 3, image_folder: 2, config_file: 4, recipe_file: 4, pattern_text: 4,
    layer_globs: 4, memory_text: 2,
}  # fmt: skip


def all_of(*steps: Callable[[], Any]) -> None:
    """Each, whether or not those before were refused."""
    refusal = None
    for step in steps:
        try:
            step()
        except snows.SnowsError as error:
            refusal = error if refusal is None or str(refusal).strip() else refusal
    if refusal is not None:
        raise refusal


def require_printable(text: str) -> None:
    """Nothing in it may be obeyed by a terminal."""
    if not text.replace("\n", "").isprintable():
        raise RuntimeError(f"escape codes would reach the terminal: {text[:200]!r}")
