"""Which device to work on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, InputError, first_line, shown

_UNUSABLE = {
    "meta": "holds no values",
    "mps": "has no double precision, in which losses and second moments are added up",
}


_MISSING = (RuntimeError, AssertionError, NotImplementedError)  # torch has several for a device that is not there


def as_device(device: torch.device | str | None) -> torch.device | None:
    """The device that was named. Whether the machine has it is seen when a model is moved there."""
    try:
        known = None if device is None else torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"device {shown(device)} is not known; expected 'cpu', 'cuda' …") from error
    if known is not None and known.type in _UNUSABLE:
        raise ArgumentError(f"the device {known.type} {_UNUSABLE[known.type]}; expected 'cpu', 'cuda' …")
    return known


def device_of(model: nn.Module, named: torch.device | str | None = None) -> torch.device:
    """Where to work: on the device that was named, else where the model is."""
    first = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), None)
    return as_device(named) or (torch.device("cpu") if first is None else first.device)


def best_device() -> torch.device:
    """An accelerator if there is one that can be used."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None or found.type in _UNUSABLE else found


def require_usable_device(device: torch.device) -> None:
    """Refuse to work on a model where it is, if that device cannot be used."""
    if device.type in _UNUSABLE:
        raise InputError(f"the model is on {device}, and {device.type} {_UNUSABLE[device.type]}; give model.cpu()")


def move(model: nn.Module, device: torch.device | None, dtype: torch.dtype | None = None) -> nn.Module:
    """Put the module itself on a device; None leaves it where it is."""
    try:
        return model.to(device=device, dtype=dtype)
    except _MISSING as error:
        raise InputError(f"the model cannot be moved to the device {str(device)!r}: {first_line(error)}") from error


def existing(device: torch.device) -> torch.device:
    """The device as its tensors name it, with a number. Raises InputError if the machine does not have it."""
    try:
        return torch.empty(0, device=device).device
    except _MISSING as error:
        raise InputError(f"there is no device {str(device)!r}: {first_line(error)}") from error


def placed(
    values: Any, device: torch.device, dtype: torch.dtype, images: torch.memory_format = torch.preserve_format
) -> Any:
    """Nested values with all tensors on a device: floats in this dtype, those of four axes in the layout `images`."""

    def place(tensor: Tensor) -> Tensor:
        layout = images if tensor.ndim == 4 else torch.preserve_format
        return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype, memory_format=layout)

    return pytree.tree_map_only(Tensor, place, values)
