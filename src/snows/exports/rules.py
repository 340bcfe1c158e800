"""Which layers an engine can run sparse, by its own rules for patterns and shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import a_type
from ..graph.capture import Call
from .base import call_tensors

# nn.MultiheadAttention and nn.TransformerEncoderLayer take the weights of their layers and refuse packed ones.
NOT_CALLED = "its module is not called with one tensor"
# Maintainers of TensorRT say that sparse kernels win "if C and K are large enough (>256)" (NVIDIA/TensorRT#3849).
TENSORRT_WIDE = 256


def is_two_of_four(weight: Tensor) -> bool:
    """Whether at most two of every four input channels are kept, at each output and kernel position."""
    if weight.ndim < 2 or weight.shape[1] % 4:
        return False
    groups = (weight != 0).movedim(1, -1).unflatten(-1, (-1, 4))
    return bool((groups.sum(-1) <= 2).all())


def owner(model: nn.Module, parameter: str) -> nn.Module:
    """The module that holds the parameter of this name."""
    return model.get_submodule(parameter.rpartition(".")[0])


def input_shapes(model: nn.Module, call: Call) -> dict[nn.Module, tuple[int, ...]]:
    """The shape of the one tensor that each module is called with; modules that are called otherwise are left out."""
    found: dict[nn.Module, tuple[int, ...]] = {}

    def watched(module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def note(*args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and isinstance(args[0], Tensor):
                found.setdefault(module, tuple(args[0].shape))
            return forward(*args, **kwargs)

        return note

    # Not with hooks: where layers have some, torch's attention leaves its fast path and calls them.
    before = {module: module.__dict__.get("forward") for module in model.modules()}
    try:
        for module in before:
            module.__dict__["forward"] = watched(module)
        call_tensors(model, call)
    finally:
        for module, own in before.items():
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own
    return found


def tensorrt_refusal(weight: Tensor) -> str | None:
    """Why TensorRT's sparse kernels cannot take a weight; None if they can."""
    if weight.shape[1] % 4:
        return f"it has {weight.shape[1]} input channels in a group; TensorRT needs a multiple of 4"
    if not is_two_of_four(weight):
        return "more than two of four input channels are kept somewhere; prune it to 2:4 (or 1:4)"
    return None


def semi_structured_refusal(module: nn.Module, parameter: str, dtype: torch.dtype = torch.float16) -> str | None:
    """Why torch's semi-structured kernels cannot take a layer; None if they can."""
    from torch.sparse import SparseSemiStructuredTensorCUSPARSELT as Kernels

    if not isinstance(module, nn.Linear) or not parameter.endswith("weight"):
        return f"it is part of {a_type(module)}; torch has 2:4 kernels for nn.Linear only"
    if dtype not in Kernels._DTYPE_SHAPE_CONSTRAINTS:
        return f"its weight is {dtype}; torch has 2:4 kernels for float16, bfloat16 and int8"
    rule = Kernels._DTYPE_SHAPE_CONSTRAINTS[dtype]
    rows, columns = module.weight.shape
    if rows % rule.sparse_min_rows or columns % rule.sparse_min_cols:
        return (
            f"it is {rows} x {columns}; torch needs multiples of {rule.sparse_min_rows} rows and "
            f"{rule.sparse_min_cols} columns"
        )
    if not is_two_of_four(module.weight):
        return "more than two of four inputs are kept somewhere; prune it to 2:4 (or 1:4)"
    return None


def openvino_refusal(weight: Tensor) -> str | None:
    """Why OpenVINO's decompression of sparse weights cannot take a weight, on a CPU with AMX; None if it can."""
    if weight.ndim != 2:
        return "it is a convolution; OpenVINO packs sparse weights of matrix products only"
    if any(size % 64 for size in weight.shape):
        return f"it is {weight.shape[0]} x {weight.shape[1]}; OpenVINO needs multiples of 64"
    return None
