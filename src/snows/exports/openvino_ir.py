"""OpenVINO: the intermediate representation, checked on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..graph.capture import Call, quietly
from .base import Saved, Written, blamed_on, tensors_of
from .trace import trace

FILE = "model.xml"
# Where the CPU has bfloat16, OpenVINO computes in it unless told otherwise.
EXACT = {"INFERENCE_PRECISION_HINT": "f32"}
SPARSE_RATE = "CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE"
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def write(saved: Saved, folder: Path) -> Written:
    import openvino

    program = trace(saved).run_decompositions({_ATTENTION: _with_all_heads})
    path = folder / FILE
    with blamed_on(f"{saved.name} cannot be converted by OpenVINO"), quietly():
        model = openvino.convert_model(program)
    with blamed_on(f"cannot write {FILE}"):
        openvino.save_model(model, path, compress_to_fp16=False)
    stored = openvino.Core().read_model(path)
    operations = [operation for operation in stored.get_ordered_ops() if operation.get_type_name() == "Constant"]
    constants = {entry.get_friendly_name(): torch.from_numpy(entry.data.copy()) for entry in operations}
    facts = {
        "openvino": openvino.__version__,
        "inputs": {entry.any_name: str(entry.partial_shape) for entry in stored.inputs},
    }
    note = (
        "Checked with INFERENCE_PRECISION_HINT=f32. On CPUs with bfloat16 OpenVINO computes in that unless told so, "
        "and outputs then differ in the third digit."
    )
    return Written(runner(path, EXACT), constants, facts, (note,))


def _with_all_heads(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, enable_gqa: bool = False, **kwargs: Any
) -> Any:
    """Attention with as many heads of key and value as of query: OpenVINO's converter knows no groups of heads."""
    if not enable_gqa:
        return NotImplemented  # stays as it is
    groups = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    return _ATTENTION(query, key, value, *args, **kwargs)


def runner(path: Path, settings: Mapping[str, Any]) -> Callable[[Call], list[Tensor]]:
    """The file on the CPU, as a function of the model's arguments."""
    import openvino

    with blamed_on("OpenVINO cannot load the model"):
        compiled = openvino.Core().compile_model(path, "CPU", dict(settings))

    def run(call: Call) -> list[Tensor]:
        outputs = compiled([tensor.numpy() for tensor in tensors_of(call)])
        return [torch.from_numpy(outputs[index].copy()) for index in range(len(compiled.outputs))]

    return run
