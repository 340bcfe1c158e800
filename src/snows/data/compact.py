"""Masks and pruned weights in few bytes: the kept values and where they are. Expanding gives the same bits again.

Places are stored in one of two ways, whichever is smaller: as one bit per weight; or, if every group of M input
channels keeps the same number, as the index of each kept value in its group (for 1:4, two bits per group instead of
four). A tensor that neither makes smaller is stored as it is. Removed weights are +0.0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..reading import MOST_DIMENSIONS

PACKED_MASKS, PACKED_MODEL = "snows.masks", "snows.compact"  # keys of a file's metadata: how it is packed
_SCHEMA = 1
_LARGEST_GROUP = 32
_LARGEST_SIZE = 1 << 48  # elements of a tensor
_VALUES, _PLACES, _PLAIN = "values:", "places:", "tensor:"  # prefixes of all names, so that no two can collide
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack_masks(masks: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file of masks, with one bit per weight."""
    shapes = {name: list(mask.shape) for name, mask in masks.items()}
    about = json.dumps({"schema": _SCHEMA, "shapes": shapes})
    return {name: _pack_bits(mask) for name, mask in masks.items()}, {PACKED_MASKS: about}


def unpack_masks(tensors: Mapping[str, Tensor], about: str) -> dict[str, Tensor]:
    """The bool masks of such a file. Raises ValueError if its parts do not fit together."""
    shapes = _read_about(about)["shapes"]
    if set(shapes) != set(tensors):
        raise ValueError("its masks and their shapes have different names")
    return {name: _unpack_bits(tensors[name], _as_shape(shape)) for name, shape in shapes.items()}


def pack_state(
    state: Mapping[str, Tensor], masks: Mapping[str, Tensor], tied: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a compact file. `tied` maps a name to the earlier name of the same tensor."""
    tensors: dict[str, Tensor] = {}
    packed: dict[str, dict[str, Any]] = {}
    for name, tensor in state.items():
        if name in tied:
            continue
        parts = _pack_weight(tensor, masks[name]) if name in masks else None
        if parts is None:
            tensors[_PLAIN + name] = tensor
        else:
            tensors[_VALUES + name], tensors[_PLACES + name], group = parts
            packed[name] = {"shape": list(tensor.shape), "group": group}
    about = {"schema": _SCHEMA, "packed": packed, "tied": dict(tied)}
    return tensors, {PACKED_MODEL: json.dumps(about)}


def expand_state(tensors: Mapping[str, Tensor], about: str) -> dict[str, Tensor]:
    """The state dict of a compact file. Raises ValueError if its parts do not fit together."""
    read = _read_about(about)
    state = {name.removeprefix(_PLAIN): tensor for name, tensor in tensors.items() if name.startswith(_PLAIN)}
    for name, entry in read["packed"].items():
        if _VALUES + name not in tensors or _PLACES + name not in tensors:
            raise ValueError(f"it lacks the values or the places of {name}")
        values, places, shape = tensors[_VALUES + name], tensors[_PLACES + name], _as_shape(entry["shape"])
        state[name] = _unpack_weight(values, places, shape, entry["group"])
    for name, other in read["tied"].items():
        if other not in state:
            raise ValueError(f"{name} is tied to {other}, which is not there")
        state[name] = state[other]
    return state


def nonzero_where_removed(weight: Tensor, mask: Tensor) -> Tensor:
    """True where the mask removes a weight that is not exactly +0.0."""
    return (_as_integers(weight) != 0) & ~mask


def _pack_weight(weight: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, int | None] | None:
    """Kept values, their places, and the size of the groups in which places are counted; None if that saves nothing."""
    group = _group_size(mask)
    if group is None:
        values, places = _as_integers(weight)[mask], _pack_bits(mask)
    else:
        grouped = _grouped(mask, group)
        values = _grouped(_as_integers(weight), group)[grouped]
        index = np.flatnonzero(grouped.numpy()) % group
        places = _pack_indices(index.astype(np.uint8), _index_bits(group))
    size = values.numel() * values.element_size() + places.numel()
    if size >= weight.numel() * weight.element_size():
        return None
    return values.view(weight.dtype), places, group


def _unpack_weight(values: Tensor, places: Tensor, shape: tuple[int, ...], group: Any) -> Tensor:
    integers = _as_integers(values)
    if group is None:
        mask = _unpack_bits(places, shape)
        if values.ndim != 1 or int(mask.sum()) != len(values):
            raise ValueError("it has more or fewer kept values than places")
        return torch.zeros(shape, dtype=integers.dtype).masked_scatter_(mask, integers).view(values.dtype)
    total, kept = math.prod(shape), len(values) if values.ndim == 1 else 0
    fits = isinstance(group, int) and 2 <= group <= _LARGEST_GROUP and len(shape) >= 2 and shape[1] % group == 0
    if not fits or not kept or not total or kept * group % total:
        raise ValueError("kept values and groups do not fit the shape")
    per_group = kept * group // total
    index = _unpack_indices(places, _index_bits(group), kept)
    if per_group > group or int(index.max()) >= group:
        raise ValueError("an index of a kept value is outside of its group")
    flat = torch.zeros(total, dtype=integers.dtype)
    flat[torch.from_numpy(np.arange(kept) // per_group * group + index)] = integers
    return flat.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1).contiguous().view(values.dtype)


def _group_size(mask: Tensor) -> int | None:
    """The M of an exact N:M mask whose indices take less than one bit per weight; None if there is none."""
    kept, total = int(mask.sum()), mask.numel()
    for group in range(2, _LARGEST_GROUP + 1) if kept and mask.ndim >= 2 else ():
        smaller = kept * _index_bits(group) < total
        if smaller and mask.shape[1] % group == 0 and kept * group % total == 0:
            counts = _grouped(mask, group).sum(-1)
            if bool((counts == kept * group // total).all()):
                return group
    return None


def _grouped(tensor: Tensor, group: int) -> Tensor:
    """One row for each group of consecutive input channels at one kernel position."""
    return tensor.movedim(1, -1).reshape(-1, group)


def _index_bits(group: int) -> int:
    return (group - 1).bit_length()


def _pack_bits(mask: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(mask.contiguous().numpy().reshape(-1), bitorder="little"))


def _unpack_bits(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape)
    if packed.dtype != torch.uint8 or packed.shape != ((count + 7) // 8,):
        raise ValueError(f"a mask of shape {shape} is {packed.dtype} of shape {tuple(packed.shape)}")
    bits = np.unpackbits(packed.numpy(), count=count, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_)).view(shape)


def _pack_indices(index: np.ndarray[Any, Any], bits: int) -> Tensor:
    table = np.empty((len(index), bits), dtype=np.uint8)
    for bit in range(bits):
        table[:, bit] = (index >> bit) & 1
    return torch.from_numpy(np.packbits(table.reshape(-1), bitorder="little"))


def _unpack_indices(packed: Tensor, bits: int, count: int) -> np.ndarray[Any, Any]:
    table = _unpack_bits(packed, (count, bits)).numpy().view(np.uint8)
    index = np.zeros(count, dtype=np.uint8)
    for bit in range(bits):
        index |= table[:, bit] << bit
    return index


def _as_integers(tensor: Tensor) -> Tensor:
    """The same bytes as whole numbers, so that no float operation can change a NaN or a sign of zero."""
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def _read_about(text: str) -> dict[str, Any]:
    about = json.loads(text)
    if not isinstance(about, dict) or about.get("schema") != _SCHEMA:
        raise ValueError(f"it is packed by another version; expected version {_SCHEMA}")
    return about


def _as_shape(shape: Sequence[int]) -> tuple[int, ...]:
    if len(shape) > MOST_DIMENSIONS or not all(type(size) is int and 0 <= size < _LARGEST_SIZE for size in shape):
        raise ValueError(f"{str(shape)[:80]} is no shape")
    if math.prod(max(size, 1) for size in shape) >= _LARGEST_SIZE:  # torch multiplies the sizes beside a zero, too
        raise ValueError(f"{shape} is too large")
    return tuple(shape)
