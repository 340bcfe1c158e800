"""Weights and masks in files, and how they fill a module, whatever tool wrote them."""

from __future__ import annotations

import json
import os
import pickle
import re
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import InputError, first_line
from ..reading import MOST_DIMENSIONS, check_unpacked, open_file
from .compact import PACKED_MASKS, PACKED_MODEL, expand_state, unpack_masks
from .tensors import is_mask, misfit, peculiarity, unusable
from .usable import require_module

_LISTED = 3  # names in a message


def read_state(path: Path) -> dict[str, Tensor]:
    """A state dict or masks: from .safetensors, packed or not, or from .pt and .pth files of nothing but tensors."""
    if path.suffix == ".safetensors":
        return _unpacked(path, *read_tensors(path))
    state = _unpickled(path)
    for key in ("state_dict", "model"):  # a checkpoint that holds more than the weights
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise InputError(f"{path} holds no state dict; save one with torch.save(model.state_dict(), ...)")
    _require_plain(path, state)
    return state


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a .safetensors file as they are stored, and its metadata."""
    open_file(path).close()  # the library would wait for a FIFO
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            _require_few_dimensions(path, file)
            tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except InputError:
        raise
    except Exception as error:  # a damaged header may name types and sizes that torch does not know
        raise InputError(f"cannot read {path}: {str(error) or type(error).__name__}") from error
    _require_plain(path, tensors)
    return tensors, metadata


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a .safetensors file. The same content always gives the same bytes."""
    save_file(dict(tensors), path, metadata=dict(metadata))
    with path.open("r+b") as file:  # safetensors writes metadata in random order
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        file.seek(8)
        file.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size))


def _unpickled(path: Path) -> Any:
    with open_file(path) as stream:
        try:
            _require_uncompressed(path, stream)
            return torch.load(stream, map_location="cpu", weights_only=True)
        except InputError:
            raise
        except (OSError, EOFError) as error:
            raise InputError(f"cannot read {path}: {error}") from error
        except Exception as error:  # unpickling raises many kinds
            raise InputError(
                f"{path} is not a file of plain tensors ({_why_not(error)}); "
                "save its state dict with torch.save(model.state_dict(), ...) or as safetensors"
            ) from error


def _why_not(error: Exception) -> str:
    """What torch says against a pickle, without its advice to run the code in it."""
    needed = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
    if needed is not None:
        return f"it needs {needed[1]}, and code in a pickle is not run"
    return "torch cannot unpickle it" if isinstance(error, pickle.UnpicklingError) else first_line(error)


def _require_uncompressed(path: Path, stream: BinaryIO) -> None:
    """torch.save never compresses, so that its archive cannot be larger than the file.

    Tar archives, which torch wrote before 2017, are refused: torch would unpack them into a folder.
    """
    with suppress(tarfile.TarError), tarfile.open(fileobj=stream, mode="r:"):
        raise InputError(f"{path} is a tar archive; expected a file as torch.save writes it")
    stream.seek(0)
    if zipfile.is_zipfile(stream):
        stream.seek(0)
        try:
            with zipfile.ZipFile(stream) as archive:
                unpacked = sum(member.file_size for member in archive.infolist())
        except Exception as error:  # damaged archives raise many kinds
            raise InputError(f"cannot read {path}: {error}") from error
        if unpacked > os.fstat(stream.fileno()).st_size:
            raise InputError(f"{path} is compressed; expected a file as torch.save writes it")
    stream.seek(0)


def _require_few_dimensions(path: Path, file: Any) -> None:
    for name in file.keys():  # noqa: SIM118
        dimensions = len(file.get_slice(name).get_shape())
        if dimensions > MOST_DIMENSIONS:
            raise InputError(f"{path}: {name} has {dimensions} dimensions; expected at most {MOST_DIMENSIONS}")


def _require_plain(path: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        problem = peculiarity(tensor)
        if problem is not None:
            raise InputError(f"{path}: {name} is {problem}; expected dense tensors of numbers")
    size = os.stat(path).st_size
    check_unpacked(path, size, sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))


def _unpacked(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> dict[str, Tensor]:
    try:
        if PACKED_MASKS in metadata:
            return unpack_masks(tensors, metadata[PACKED_MASKS])
        return expand_state(tensors, metadata[PACKED_MODEL]) if PACKED_MODEL in metadata else tensors
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # metadata of another form
        raise InputError(f"cannot read {path}: {error}") from error


def fill(model: nn.Module, state: dict[str, Tensor], origin: str) -> None:
    """Load a state dict into the model. All names and shapes must fit.

    Two differences are allowed: counters of batch norms, which old files lack, and other ways to write masks, see
    `fitted`. `origin` names the state dict in error messages.
    """
    require_module(model, "model")
    own = model.state_dict()
    for name, tensor in own.items():
        problem = unusable(tensor) if isinstance(tensor, Tensor) else None  # a module's extra state may be anything
        if problem is not None:
            raise InputError(f"{name} of {type(model).__name__} is {problem}; nothing can be loaded into it")
    state = fitted(state, own)
    problems = _misfits(state, own)
    if problems:
        raise InputError(f"{origin} does not fit {type(model).__name__}: {'; '.join(problems)}")
    try:
        model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # types that torch cannot convert, such as 4-bit floats
        raise InputError(f"{origin} does not fit {type(model).__name__}: {' '.join(str(error).split())}") from error


def _misfits(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """What keeps a state dict from filling a model that has the state dict `own`."""
    shared = [name for name in state if name in own]
    differences = {
        "it lacks": [name for name in own if name not in state and not name.endswith("num_batches_tracked")],
        "it has no place for": [name for name in state if name not in own],
        "other shapes in": [name for name in shared if state[name].shape != own[name].shape],
    }
    if not any(differences.values()):  # shapes first: they are told apart without a look at the values
        problems = ((name, misfit(state[name], own[name], name.endswith("_mask"))) for name in shared)
        return [f"{name} {problem}" for name, problem in problems if problem is not None][:_LISTED]
    return [
        f"{what} {', '.join(names[:_LISTED])}" + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
        for what, names in differences.items()
        if names
    ]


def fitted(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict under the names of the model's own one, if they differ only in how masks are written.

    Files of torch.nn.utils.prune hold a weight X as X_orig * X_mask. Files of NVIDIA's ASP hold X and a mask that may
    not be applied yet; they become X * mask if the model has no place for the mask. The other way round, a file's X
    also fills a model with X_orig and X_mask. That mask then stays, unless it would remove a weight of the file.
    """
    state = unwrapped(state, own)
    for name in own:
        _apply_masks(name, state, own)
    for name in [name for name in state if name not in own]:
        original, mask = f"{name}_orig", mask_names(name)[0]
        if original in own and _have_one_shape(state[name], own.get(mask)):
            weight = state.pop(name)
            state[original] = weight
            state[mask] = own[mask].bool().to(weight.device) | (weight != 0)
    return state


def _apply_masks(name: str, state: dict[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Make the weight of this name from the parts in which a file holds it."""
    by_torch, by_asp = mask_names(name)
    original = f"{name}_orig"
    for mask in (by_torch, by_asp):
        if mask in state and not is_mask(state[mask]):
            raise InputError(f"{mask} has values other than 0 and 1; expected a mask")
    if name not in state and _have_one_shape(state.get(original), state.get(by_torch)):
        state[name] = _masked(state.pop(original), state.pop(by_torch))
    if by_asp not in own and _have_one_shape(state.get(name), state.get(by_asp)):
        state[name] = _masked(state[name], state.pop(by_asp))
        state.pop(stowed_name(by_asp), None)


def _masked(weight: Tensor, mask: Tensor) -> Tensor:
    """In the weight's own type, whatever that of the mask is."""
    return weight * mask.to(weight)


def mask_names(weight: str) -> tuple[str, str]:
    """Where other tools keep the mask of a weight: torch.nn.utils.prune, and NVIDIA's ASP (apex.contrib.sparsity)."""
    module, dot, name = weight.rpartition(".")
    return f"{weight}_mask", f"{module}{dot}__{name}_mma_mask"


def stowed_name(mask: str) -> str:
    """Where ASP may keep the weights that the mask of this name removes."""
    return f"{mask.removesuffix('mask')}pruned_p"


def unwrapped(state: Mapping[str, Tensor], own: Iterable[str]) -> dict[str, Tensor]:
    """The state dict without DataParallel's prefix `module.`, unless the model's own names have it."""
    prefix = "module."
    wrapped = all(name.startswith(prefix) for name in state) and not any(name.startswith(prefix) for name in own)
    return {name.removeprefix(prefix) if wrapped else name: tensor for name, tensor in state.items()}


def _have_one_shape(weight: Tensor | None, mask: Tensor | None) -> bool:
    return weight is not None and mask is not None and weight.shape == mask.shape
