"""Which tensors a file or a caller may give: plain ones, of numbers that torch can compute with.

`peculiarity` is for files and masks, where nothing but plain tensors is expected; `unusable` for models and samples,
whose tensors torch must be able to compute with as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import a_type
from ..reading import MOST_DIMENSIONS, is_bomb

_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_FLOATS |= {getattr(torch, name) for name in dir(torch) if name.startswith("float8_")}
_WHOLE = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64}
_DTYPES = _FLOATS | _WHOLE | {torch.bool, torch.complex64, torch.complex128}


def peculiarity(tensor: Tensor) -> str | None:
    """What keeps a tensor from being read, as in "it is …"; None if it is a plain one."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return a_type(tensor)
    return unusable(tensor)


def unusable(tensor: Tensor) -> str | None:
    """What keeps torch from computing with a tensor as it is, as in "it is …"; None if it can.

    Subclasses that behave like a plain tensor are fine.
    """
    if is_traceable_wrapper_subclass(tensor) and not tensor.is_nested:
        return a_type(tensor)
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return f"sparse ({tensor.layout})"
    if tensor.is_meta:
        return "without values (on the device meta)"
    if tensor.dtype not in _DTYPES:
        return f"{tensor.dtype}, which torch cannot compute with"
    if is_bomb(tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()):
        return f"expanded to {tensor.numel():,} elements"
    return f"of {tensor.ndim} dimensions" if tensor.ndim > MOST_DIMENSIONS else None


def kind_of(tensor: Tensor) -> str:
    """What its numbers are."""
    if tensor.is_floating_point():
        return "floats"
    if tensor.is_complex():
        return "complex numbers"
    return "bools" if tensor.dtype == torch.bool else "whole numbers"


def is_mask(tensor: Tensor) -> bool:
    """Whether it holds bools, or real numbers that are all 0 or 1."""
    if tensor.is_complex():
        return False
    return tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def is_8_bit_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() == 1


def widened(tensor: Tensor) -> Tensor:
    """8-bit floats, of which torch cannot tell which are finite, as 32-bit ones."""
    return tensor.float() if is_8_bit_float(tensor) else tensor


def spoilt(model: nn.Module) -> list[str]:
    """Names of parameters that are not finite, and of saved buffers with NaN (attention masks may be infinite)."""
    floats = (item for item in model.named_parameters() if item[1].is_floating_point())
    bad = [name for name, parameter in floats if not widened(parameter.detach()).isfinite().all()]
    saved, buffers = model.state_dict().keys(), model.named_buffers()
    return bad + [name for name, buffer in buffers if name in saved and widened(buffer).isnan().any()]


def misfit(tensor: Tensor, target: Tensor, mask: bool) -> str | None:
    """Why a tensor cannot be stored in the type of another one as it is, but for the rounding of floats.

    `mask` says that the target holds a mask as numbers, as torch.nn.utils.prune does.
    """
    given, wanted = kind_of(tensor), kind_of(target)
    if given != wanted and mask and is_mask(tensor):
        return None
    if given != wanted and (wanted == "floats" or "complex numbers" in (given, wanted)):
        return f"holds {given} ({tensor.dtype}); expected {wanted}"
    cast = tensor.to(target.dtype)
    if wanted in ("floats", "complex numbers"):
        fits = not _is_narrower(target, tensor) or torch.equal(_is_finite(cast), _is_finite(tensor))
    else:
        fits = bool((cast.to(tensor.dtype) == tensor).all())
    return None if fits else f"holds {given} ({tensor.dtype}) that do not fit into {target.dtype}"


def _is_narrower(one: Tensor, other: Tensor) -> bool:
    return torch.finfo(one.dtype).max < torch.finfo(other.dtype).max


def _is_finite(tensor: Tensor) -> Tensor:
    return widened(tensor).isfinite()
