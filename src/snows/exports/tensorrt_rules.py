"""TensorRT: the ONNX file, which layers its sparse kernels can take, and the command that builds an engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from . import onnx_file
from .base import Saved, Written
from .rules import TENSORRT_WIDE, tensorrt_refusal

_TRIED = (1, 8, 32)  # batch sizes of the engine's profile: smallest, best, largest


def write(saved: Saved, folder: Path) -> Written:
    written = onnx_file.write(saved, folder)
    layers: dict[str, dict[str, Any]] = {}
    for name in saved.masks:
        weight = saved.weight(name)
        refusal = tensorrt_refusal(weight)
        wide = weight.shape[0] > TENSORRT_WIDE and weight.shape[1] > TENSORRT_WIDE
        layers[name] = {"eligible": refusal is None, "wide": wide, "reason": refusal}
    eligible = [name for name, layer in layers.items() if layer["eligible"]]
    wide_too = [name for name in eligible if layers[name]["wide"]]
    notes = (
        f"{len(eligible)} of {len(layers)} layers have a pattern and shape that TensorRT's sparse kernels take; in "
        f"{len(wide_too)} of them inputs and outputs are more than {TENSORRT_WIDE} channels, as its makers advise.",
        "TensorRT times dense and sparse kernels and takes the faster; the log of --verbose names its choice. "
        "TensorRT 11 has no --fp16: convert with modelopt.onnx.autocast first.",
        "Not run in TensorRT here: it needs an NVIDIA GPU.",
    )
    facts = {**written.facts, "layers": layers, "command": _command(written.facts["inputs"])}
    return replace(written, facts=facts, notes=notes)


def _command(inputs: dict[str, list[int | str]]) -> str:
    """How trtexec of TensorRT 10 builds an engine and times it."""
    words = ["trtexec", f"--onnx={onnx_file.FILE}", "--fp16", "--sparsity=enable", "--saveEngine=model.engine"]
    for flag, batch in zip(("--minShapes", "--optShapes", "--maxShapes"), _TRIED, strict=True):
        shapes = [f"{name}:{_shape(axes, batch)}" for name, axes in inputs.items()]
        words.append(f"{flag}={','.join(shapes)}")
    return " ".join([*words, "--verbose"])


def _shape(axes: list[int | str], batch: int) -> str:
    """As trtexec reads it. Only the batch has a name instead of a size."""
    return "x".join(str(batch if isinstance(axis, str) else axis) for axis in axes)
