"""Small files that would become large, deep or long, and numbers that cannot be computed with."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from snows.cli.request import Request, read_config
from snows.data import compact, weights
from snows.data.sources import DataConfig, load_data
from snows.patterns.curves import Curves
from snows.reading import read_json
from snows.recipe import DEFAULT

from .mutations import odd_value
from .targets import all_of
from .world import Case


def _compressed_zeros(size: int, name: str = "x.npy") -> bytes:
    """A npz archive whose one array takes this many bytes."""
    stream = io.BytesIO()
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (size,)})
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr(name, head.getvalue() + bytes(size))
    return stream.getvalue()


def _npz_bomb(case: Case) -> None:
    """Small ones are unpacked in truth; for large ones the size is only said."""
    rng = case.random
    content = bytearray(_compressed_zeros(rng.choice([10, 10**5, 10**6])))
    if rng.random() < 0.7:
        at = content.rindex(b"PK\x01\x02") + 24  # the unpacked size in the directory
        content[at : at + 4] = rng.choice([0, 2**28, 2**30, 2**32 - 2]).to_bytes(4, "little")
    path = case.write("x.npz", bytes(content))
    load_data(f"npz:{path}", 4, config=DataConfig((0.0,), (1.0,)))


def _long_image(case: Case) -> None:
    rng = case.random
    sides = [1, rng.choice([1, 500, 9000, 60_000])]
    rng.shuffle(sides)
    stream = io.BytesIO()
    Image.new(rng.choice(["L", "RGB", "P", "I;16", "1"]), (sides[0], sides[1])).save(stream, "PNG")
    case.write("images/a/0.png", stream.getvalue())
    load_data(f"folder:{case.folder / 'images'}", 4, config=DataConfig(size=rng.choice([1, 8, 224])))


def _deep_config(case: Case) -> None:
    rng = case.random
    count = rng.choice([10, 1000, 50_000])
    text = rng.choice(["a." * count + "a = 1", "a = " + "{a = " * count, "[" + "a." * count + "a]", "[[a]]\n" * count])
    _request(case.write("c.toml", text.encode()))


def _wide_json(case: Case) -> None:
    rng = case.random
    count = rng.choice([10, 10_000, 300_000])
    text = rng.choice(["[" + "[]," * count + "[]]", "[" * count, '{"a":' * count, "9" * count, '{"a": ' + "1" * count])
    path = case.write("x.json", b'{"schema": 1, "self": ' + text.encode() + b"}")
    all_of(lambda: read_json(path), lambda: _request().recipe(str(path), None), lambda: Curves(str(path)).layers)


def _recipe_choices(case: Case) -> None:
    rng = case.random
    names = ["sweeps", "ridge", "self", "changes", "schema", "minibatch", "horizon", "held_out", "effort"]
    found = {rng.choice(names): rng.choice([odd_value(rng), 10 ** rng.choice([9, 10, 400])]) for _ in range(2)}
    path = case.write("r.json", json.dumps({"schema": 1, **found}).encode("utf-8", "surrogatepass"))
    all_of(lambda: _request().recipe(str(path), None), lambda: DEFAULT.replace(**found))


def _shapes(case: Case) -> None:
    rng = case.random
    sizes = [0, 1, 2, 4, 8, 2**31, 2**62, 2**63, -1, True, 1.0]
    shape = [rng.choice(sizes) for _ in range(rng.choice([0, 1, 2, 3, 17, 5000]))]
    packed = {"w": {"shape": shape, "group": rng.choice([None, 2, 4, 0, 33, True])}}
    parts = {
        "values:w": torch.ones(rng.choice([0, 1, 8])),
        "places:w": torch.zeros(rng.choice([0, 1, 2]), dtype=torch.uint8),
    }
    words = {compact.PACKED_MODEL: json.dumps({"schema": 1, "packed": packed, "tied": {}})}
    masks = {compact.PACKED_MASKS: json.dumps({"schema": 1, "shapes": {"w": shape}})}
    all_of(
        lambda: weights._unpacked(Path("x"), parts, words),
        lambda: weights._unpacked(Path("x"), {"w": parts["places:w"]}, masks),
    )


def bombs(case: Case) -> None:
    case.random.choice([_npz_bomb, _long_image, _deep_config, _wide_json, _recipe_choices, _shapes])(case)


def _request(path: Path | None = None) -> Request:
    return Request("m", None, None, 1, 0, "cpu", True, read_config(path))


TARGETS: dict[Callable[[Case], None], int] = {bombs: 4}
