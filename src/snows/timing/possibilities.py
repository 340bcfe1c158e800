"""Where a layer could run faster for its zeros, by the engines' own rules, and what no engine can do."""

from __future__ import annotations

from torch import Tensor, nn

from ..exports.rules import (
    NOT_CALLED,
    TENSORRT_WIDE,
    is_two_of_four,
    openvino_refusal,
    semi_structured_refusal,
    tensorrt_refusal,
)
from .kernels import csr_refusal

_FEW_CHANNELS = 32
# What each engine takes, in its own rules for patterns and shapes.
RULES = {
    "torch 2:4 on an NVIDIA GPU": "linear layers in half precision with 2:4, rows and columns in multiples of 16",
    "TensorRT on an NVIDIA GPU": f"2:4, input channels in multiples of 4 (its makers advise more than {TENSORRT_WIDE})",
    "torch CSR on a CPU": "linear layers and 1x1 convolutions, any zeros",
    "OpenVINO in int8 on a CPU with AMX": "products of matrices, rows and columns in multiples of 64",
    "XNNPACK on a CPU": "1x1 convolutions of stride 1 with two thirds zeros or more",
}


def elsewhere(module: nn.Module, parameter: str, weight: Tensor, called: bool = True) -> dict[str, str | None]:
    """By engine, why its sparse kernels cannot take the layer; None if they can. A speed-up is not implied.

    `called` says whether the network calls the module, or takes its weight otherwise.
    """
    of_torch = None if called else NOT_CALLED
    return {
        "torch 2:4 on an NVIDIA GPU": semi_structured_refusal(module, parameter) or of_torch,
        "TensorRT on an NVIDIA GPU": tensorrt_refusal(weight),
        "torch CSR on a CPU": csr_refusal(module) or of_torch,
        "OpenVINO in int8 on a CPU with AMX": openvino_refusal(weight),
        "XNNPACK on a CPU": _xnnpack_refusal(module, weight),
    }


def never(module: nn.Module, weight: Tensor) -> tuple[str, ...]:
    """What no hardware that we know of gains from this layer's zeros, one sentence each."""
    found = []
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and weight.shape[1] == 1 and module.groups > 1:
        return ("a depthwise convolution has one input channel for each output, so that there is no sum to shorten",)
    if weight.shape[1] < _FEW_CHANNELS:
        found.append(f"with {weight.shape[1]} input channels, moving data takes longer than multiplying")
    if not is_two_of_four(weight):
        found.append("on a GPU, tensor cores skip zeros of 2:4 only; other zeros are multiplied")
    elif sparsity(weight) > 0.6:
        found.append("on a GPU, tensor cores compute what has more zeros than 2:4 as 2:4, no faster")
    return tuple(found)


def sparsity(weight: Tensor) -> float:
    return 1 - int(weight.count_nonzero()) / weight.numel()


def _xnnpack_refusal(module: nn.Module, weight: Tensor) -> str | None:
    if not isinstance(module, nn.Conv2d) or set(module.kernel_size) != {1} or set(module.stride) != {1}:
        return "it is no 1x1 convolution of stride 1"
    if sparsity(weight) < 2 / 3:
        return "XNNPACK takes weights of which two thirds or more are zero"
    return None
