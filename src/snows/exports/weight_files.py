"""safetensors: the weights alone, once with their zeros and once without."""

from __future__ import annotations

from pathlib import Path

from ..data.compact import pack_state
from ..data.usable import copied
from ..data.weights import fill, read_state, write_tensors
from ..results.manifest import COMPACT, MODEL
from ..version import __version__
from .base import Saved, Written, call_tensors


def write(saved: Saved, folder: Path) -> Written:
    state = {name: tensor.contiguous().clone() for name, tensor in saved.model.state_dict().items()}
    written_by = {"format": "pt", "snows": __version__}
    write_tensors(folder / MODEL, state, written_by)
    tensors, packed = pack_state(state, saved.masks, {})
    write_tensors(folder / COMPACT, tensors, {**written_by, **packed})
    dense, expanded = read_state(folder / MODEL), read_state(folder / COMPACT)
    stored = copied(saved.model)
    fill(stored, expanded, COMPACT)
    # Zeros are looked for in the one file, outputs are computed from the other.
    note = f"{COMPACT} holds kept weights and their places; snows.data.weights.read_state expands it."
    return Written(lambda call: call_tensors(stored, call), dense, {}, (note,))
