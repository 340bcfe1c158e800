"""torch.export: a saved program that runs without the model's code."""

from __future__ import annotations

import io
from pathlib import Path

import torch

from ..graph.capture import quietly
from .base import Saved, Written, call_tensors
from .trace import trace

FILE = "model.pt2"


def write(saved: Saved, folder: Path) -> Written:
    program = trace(saved)
    packed = io.BytesIO()  # written to a full disk, torch's own writer ends the whole process
    with quietly():
        torch.export.save(program, packed)
    (folder / FILE).write_bytes(packed.getbuffer())
    with quietly():
        stored = torch.export.load(folder / FILE)
    module = stored.module()
    return Written(lambda call: call_tensors(module, call), dict(stored.state_dict), {"torch": str(torch.__version__)})
