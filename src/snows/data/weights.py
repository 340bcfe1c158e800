"""Weights and masks from files, and how they fill a module, whatever tool wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import safetensors
import torch
from torch import Tensor, nn

from ..errors import InputError
from .compact import PACKED_MASKS, PACKED_MODEL, expand_state, unpack_masks


def read_state(path: Path) -> dict[str, Tensor]:
    """A state dict or masks from .safetensors, packed or not, or from .pt/.pth files that hold nothing but tensors."""
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    if path.suffix == ".safetensors":
        return _unpacked(path, *read_tensors(path))
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    except Exception as error:  # unpickling raises many kinds
        raise InputError(
            f"{path} is not a file of plain tensors ({(str(error) or type(error).__name__).splitlines()[0][:200]}); "
            "save its state dict with torch.save(model.state_dict(), ...) or as safetensors"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise InputError(f"{path} holds no state dict; save one with torch.save(model.state_dict(), ...)")
    _refuse_half_bytes(path, state)
    return state


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a .safetensors file as they are stored, and its metadata."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except Exception as error:  # a damaged header may name types and sizes that torch knows nothing of
        raise InputError(f"cannot read {path}: {str(error) or type(error).__name__}") from error
    _refuse_half_bytes(path, tensors)
    return tensors, about


def _refuse_half_bytes(path: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float4_e2m1fn_x2:
            raise InputError(f"{path}: {name} is {tensor.dtype}, which torch cannot compute with; give wider floats")


def _unpacked(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> dict[str, Tensor]:
    try:
        if PACKED_MASKS in metadata:
            return unpack_masks(tensors, metadata[PACKED_MASKS])
        return expand_state(tensors, metadata[PACKED_MODEL]) if PACKED_MODEL in metadata else tensors
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # metadata of another form
        raise InputError(f"cannot read {path}: {error}") from error


def fill(model: nn.Module, state: dict[str, Tensor], origin: str) -> None:
    """Strictly, but for counters that old files lack and for the ways in which others write masks (see `fitted`)."""
    own = model.state_dict()
    state = fitted(state, own)
    missing = [name for name in own if name not in state and not name.endswith("num_batches_tracked")]
    extra = [name for name in state if name not in own]
    wrong = [name for name in state if name in own and state[name].shape != own[name].shape]
    problems = [
        f"{what} {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for what, names in (("it lacks", missing), ("it has no place for", extra), ("other shapes in", wrong))
        if names
    ]
    if problems:
        raise InputError(f"{origin} does not fit {type(model).__name__}: {'; '.join(problems)}")
    try:
        model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # types that torch cannot convert, such as 4-bit floats
        raise InputError(f"{origin} does not fit {type(model).__name__}: {' '.join(str(error).split())}") from error


def fitted(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict under the names of the model's own one, where they differ only in how masks are written.

    A weight X of the model is X_orig * X_mask in files of torch.nn.utils.prune modules, and X * mask in files of
    NVIDIA's ASP, whose buffers are dropped where the model has none. The other way round, a file's X fills a module
    that has X_orig and X_mask; that mask stays as it is, unless it would remove something of X.
    """
    found = unwrapped(state, own)
    for name in own:
        by_torch, by_asp = mask_names(name)
        original = f"{name}_orig"
        if name not in found and _belong_together(found.get(original), found.get(by_torch)):
            found[name] = found.pop(original) * found.pop(by_torch)
        if by_asp not in own and _belong_together(found.get(name), found.get(by_asp)):
            found[name] = found[name] * found.pop(by_asp)
            found.pop(stowed_name(by_asp), None)
    for name in [name for name in found if name not in own]:
        original, by_torch = f"{name}_orig", mask_names(name)[0]
        if original in own and _belong_together(found[name], own.get(by_torch)):
            weight = found.pop(name)
            found[original] = weight
            found[by_torch] = own[by_torch].bool().to(weight.device) | (weight != 0)
    return found


def mask_names(weight: str) -> tuple[str, str]:
    """Where others keep the mask of a weight: torch.nn.utils.prune, and NVIDIA's ASP (apex.contrib.sparsity)."""
    module, dot, name = weight.rpartition(".")
    return f"{weight}_mask", f"{module}{dot}__{name}_mma_mask"


def stowed_name(mask: str) -> str:
    """Where ASP keeps the removed weights, if it keeps them, beside the mask of this name."""
    return f"{mask.removesuffix('mask')}pruned_p"


def unwrapped(state: Mapping[str, Tensor], own: Iterable[str]) -> dict[str, Tensor]:
    """Without DataParallel's `module.` before every name, unless the model's own names have it."""
    prefix = "module."
    wrapped = all(name.startswith(prefix) for name in state) and not any(name.startswith(prefix) for name in own)
    return {name.removeprefix(prefix) if wrapped else name: tensor for name, tensor in state.items()}


def _belong_together(weight: Tensor | None, mask: Tensor | None) -> bool:
    """What does not is left as it is, for the comparison with the model to say so."""
    return weight is not None and mask is not None and weight.shape == mask.shape
