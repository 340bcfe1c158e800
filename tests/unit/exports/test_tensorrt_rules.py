"""What TensorRT is told: which layers its sparse kernels take, and the command that builds an engine."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import snows
from tests.exported import save, seeded


def test_the_facts(tmp_path: Path) -> None:
    widths = (30, 300, 320, 256, 8)
    layers = [layer for sizes in pairwise(widths) for layer in (nn.Linear(*sizes), nn.ReLU())]
    model, x = seeded(nn.Sequential(*layers[:-1])), torch.randn(16, 30, generator=torch.Generator().manual_seed(0))
    pruned = save(tmp_path / "pruned", model, x, "2:4, 0=0.5, 6=0.5")
    exported = snows.export(pruned, "tensorrt", model, out=tmp_path / "out")
    assert exported.facts["layers"] == {
        "0.weight": {
            "eligible": False, "wide": False,
            "reason": "it has 30 input channels in a group; TensorRT needs a multiple of 4",
        },
        "2.weight": {"eligible": True, "wide": True, "reason": None},
        "4.weight": {"eligible": True, "wide": False, "reason": None},  # 256 outputs are not more than 256
        "6.weight": {
            "eligible": False, "wide": False,
            "reason": "more than two of four input channels are kept somewhere; prune it to 2:4 (or 1:4)",
        },
    }  # fmt: skip
    assert exported.facts["command"] == (
        "trtexec --onnx=model.onnx --fp16 --sparsity=enable --saveEngine=model.engine "
        "--minShapes=input:1x30 --optShapes=input:8x30 --maxShapes=input:32x30 --verbose"
    )
    assert exported.notes[0] == (
        "2 of 4 layers have a pattern and shape that TensorRT's sparse kernels take; in 1 of them inputs and outputs "
        "are more than 256 channels, as its makers advise."
    )
    assert exported.facts["inputs"] == {"input": ["batch", 30]}
    assert (tmp_path / "out" / "model.onnx").is_file()
    assert json.loads((tmp_path / "out" / "export.json").read_text())["facts"] == exported.facts
