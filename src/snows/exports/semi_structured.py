"""torch's 2:4 kernels: half-precision weights, and which layers are to be packed.

Packed weights fit one kind of GPU and one version of torch, so what is written are plain weights, which are packed when
the model is loaded. That takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.sparse import to_sparse_semi_structured

from ..data.usable import copied
from ..data.weights import fill, read_state, write_tensors
from ..devices.device import placed
from ..errors import InputError
from ..graph.capture import Call, quietly
from ..version import __version__
from .base import Saved, Written, blamed_on, call_tensors
from .rules import NOT_CALLED, input_shapes, owner, semi_structured_refusal

FILE = "model.safetensors"
_DTYPE = torch.float16


def write(saved: Saved, folder: Path) -> Written:
    called = input_shapes(saved.model, saved.inputs(1))
    refusals = {name: _refusal(owner(saved.model, name), name, called) for name in saved.masks}
    taken = [name for name, refusal in refusals.items() if refusal is None]
    if not taken:
        name, refusal = next(iter(refusals.items()))
        raise InputError(f"no layer of {saved.name} can take torch's 2:4 kernels: {name}: {refusal}")
    half = copied(saved.model).to(_DTYPE)
    state = {name: tensor.contiguous().clone() for name, tensor in half.state_dict().items()}
    write_tensors(folder / FILE, state, {"format": "pt", "snows": __version__})
    stored = read_state(folder / FILE)
    fill(half, stored, FILE)
    facts = {"pack": taken, "dense": {name: refusal for name, refusal in refusals.items() if refusal is not None}}
    if torch.cuda.is_available():
        with blamed_on("torch cannot pack the weights on this GPU"):
            module = pack(half.cuda(), taken)
        note = f"Checked packed, on {torch.cuda.get_device_name()}; layers packed: {len(taken)}."
    else:
        module = half
        for name in taken:
            _check_packing(name, stored[name])
        note = (
            "torch's 2:4 kernels need an NVIDIA GPU, and here is none: weights were packed by torch's conversion and "
            f"unpacked again, bit for bit, but not run packed; layers: {len(taken)}."
        )
    return Written(lambda call: _run(module, call), stored, facts, (note,))


def pack(model: nn.Module, parameters: Iterable[str]) -> nn.Module:
    """Pack these weights of a model on a GPU, in place."""
    for name in parameters:
        module = owner(model, name)
        with quietly():  # torch calls the class a prototype
            packed = to_sparse_semi_structured(module.get_parameter("weight").detach())
        module.weight = nn.Parameter(packed, requires_grad=False)
    return model


def _refusal(module: nn.Module, parameter: str, called: Container[nn.Module]) -> str | None:
    refusal = semi_structured_refusal(module, parameter, _DTYPE)
    return refusal if refusal is not None or module in called else NOT_CALLED


def _check_packing(name: str, weight: Tensor) -> None:
    """Pack and unpack by the part of torch that works without a GPU. Its tiles are the coarser ones."""
    from torch.sparse._semi_structured_conversions import (
        sparse_semi_structured_from_dense_cutlass as packed,
    )
    from torch.sparse._semi_structured_conversions import (
        sparse_semi_structured_to_dense_cutlass as unpacked,
    )

    rows, columns = (-size % 64 for size in weight.shape)
    padded = nn.functional.pad(weight, (0, columns, 0, rows))
    if not torch.equal(unpacked(*packed(padded)), padded):
        raise InputError(f"{name} is not the same after torch packed it as 2:4")


def _run(module: nn.Module, call: Call) -> list[Tensor]:
    """The outputs on the CPU, computed in half precision where the model is."""
    device = next(module.parameters()).device
    return [output.cpu() for output in call_tensors(module, placed(call, device, _DTYPE))]
