"""Hugging Face: a folder for from_pretrained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import InputError
from ..graph.capture import quietly
from .base import Saved, Written, blamed_on, call_tensors


def write(saved: Saved, folder: Path) -> Written:
    model: Any = saved.model
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        raise InputError(f"{saved.name} is no model of transformers, so it cannot be written for from_pretrained")
    with blamed_on("save_pretrained failed"), quietly():
        model.save_pretrained(folder)
    with blamed_on("from_pretrained failed"), quietly():
        stored = type(model).from_pretrained(folder, dtype=model.dtype).eval()
    note = "Tokenizers and image processors are not part of a saved result; take those of the dense model."
    return Written(lambda call: call_tensors(stored, call), dict(stored.state_dict()), {}, (note,))
