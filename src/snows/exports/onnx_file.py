"""ONNX: one file, checked in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..graph.capture import Call, quietly
from .base import Saved, Written, blamed_on, tensors_of
from .trace import dynamic_shapes, trace

FILE = "model.onnx"
OPSET = 18  # the oldest that torch's exporter writes; all engines of the documentation read it
_LARGEST_FILE = 1 << 30  # bytes of weights; a file of 2 GiB cannot be read


def write(saved: Saved, folder: Path) -> Written:
    import onnx

    program = trace(saved)
    path = folder / FILE
    with blamed_on(f"{saved.name} cannot be written as ONNX"), quietly():
        exported = torch.onnx.export(
            program, dynamo=True, dynamic_shapes=dynamic_shapes(saved), opset_version=OPSET, verbose=False
        )
        assert exported is not None
        apart = sum(p.nbytes for p in saved.model.parameters()) > _LARGEST_FILE
        exported.save(path, external_data=apart)
    stored = onnx.load(path)
    facts = {
        "opset": stored.opset_import[0].version,
        "inputs": {entry.name: _shape(entry) for entry in stored.graph.input},
        "outputs": {entry.name: _shape(entry) for entry in stored.graph.output},
        "operators": sorted({node.op_type for node in stored.graph.node}),
    }
    constants = {entry.name: _tensor(onnx.numpy_helper.to_array(entry)) for entry in stored.graph.initializer}
    return Written(runner(path), constants, facts)


def runner(path: Path, threads: int = 0) -> Callable[[Call], list[Tensor]]:
    """The file in ONNX Runtime on the CPU, as a function of the model's arguments."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    with blamed_on("ONNX Runtime cannot load the model"):
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(call: Call) -> list[Tensor]:
        given = dict(zip(names, (tensor.numpy() for tensor in tensors_of(call)), strict=True))
        return [torch.from_numpy(output) for output in session.run(None, given)]

    return run


def _shape(entry: object) -> list[int | str]:
    axes = entry.type.tensor_type.shape.dim  # type: ignore[attr-defined]
    return [axis.dim_param or axis.dim_value for axis in axes]


def _tensor(array: object) -> Tensor:
    return torch.from_numpy(array.copy())  # type: ignore[attr-defined]
