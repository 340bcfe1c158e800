"""What is whole and what is spoilt: networks and files that are made once, and one case with its own folder."""

from __future__ import annotations

import copy
import io
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save
from torch import nn

import snows
from snows.data.preparation import prepare
from snows.recipe import DEFAULT

from .mutations import WORDS, spoil_bytes, spoil_text


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
    settings: dict[str, Any]
    saved_result: snows.Result


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
        _npz(), json.loads((resume / "settings.json").read_text(encoding="utf-8")), result,
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
