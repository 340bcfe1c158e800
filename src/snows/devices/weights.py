"""Weights that do not fit the device: they rest outside of it, and are copied to it when they are read.

They rest in host memory; if the host is where the work is done, on disk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping

import torch
from torch import Tensor, nn

from .offload import on_disk

_HALF = (torch.float16, torch.bfloat16)  # a run computes in float32 instead


class Room:
    """The part of a device's memory that copies of resting tensors may fill. The most recent ones stay.

    Attributes:
        device: Where the tensors are read.
        bytes: The most that the copies take together. A larger tensor is copied each time it is read.
        held: What they take now.
    """

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        self.device, self.bytes, self.held = device, most_bytes, 0
        # By the identity of the resting tensor, which stays with its copy, so that no other one gets the same.
        self._copies: OrderedDict[int, tuple[Tensor, Tensor]] = OrderedDict()

    def copy_of(self, resting: Tensor) -> Tensor:
        """The tensor on the device."""
        if self._is_here(resting):
            return resting
        if id(resting) in self._copies:
            self._copies.move_to_end(id(resting))
            return self._copies[id(resting)][1]
        self._make_room(resting.nbytes)  # before it is copied
        copy = self._copied(resting)
        self._keep(resting, copy)
        return copy

    def at_rest(self, tensor: Tensor) -> Tensor:
        """The tensor outside of the device, where it stays as a copy for as long as it is recent."""
        if not self._is_here(tensor):
            return tensor
        if self.device.type == "cpu":
            return on_disk(tensor)
        resting = _on_host(tensor)
        self._make_room(tensor.nbytes)
        self._keep(resting, tensor)
        return resting

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device.type

    def _copied(self, resting: Tensor) -> Tensor:
        return resting.to(self.device)

    def _keep(self, resting: Tensor, copy: Tensor) -> None:
        if copy.nbytes <= self.bytes:
            self._copies[id(resting)] = resting, copy
            self.held += copy.nbytes

    def _make_room(self, most_bytes: int) -> None:
        while self._copies and self.held + most_bytes > self.bytes:
            _, (_, copy) = self._copies.popitem(last=False)
            self.held -= copy.nbytes


def _on_host(tensor: Tensor) -> Tensor:
    # Not pinned: a weight goes each way about once in a sweep, and pinning copies it once more.
    return tensor.cpu()


class Resting(MutableMapping[str, Tensor]):
    """Tensors by name that rest outside of a device. Each is on the device once it is read; what is set is put to rest.

    Several such mappings may share a room, and tensors that never changed.
    """

    def __init__(self, room: Room, tensors: Mapping[str, Tensor]) -> None:
        self.room, self.tensors = room, dict(tensors)  # where they rest

    def __getitem__(self, name: str) -> Tensor:
        return self.room.copy_of(self.tensors[name])

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = self.room.at_rest(tensor)

    def __delitem__(self, name: str) -> None:
        del self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __copy__(self) -> Resting:
        return Resting(self.room, self.tensors)


# Asked of any weights. Most often all of them are on the device, in a dict.


def rest(weights: Mapping[str, Tensor]) -> bool:
    """Whether the weights are only on the device while they are read."""
    return isinstance(weights, Resting)


def where_they_rest(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The weights where they are when nobody reads them."""
    return weights.tensors if isinstance(weights, Resting) else weights


def kept_as(weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> MutableMapping[str, Tensor]:
    """Other tensors, kept in the same place as the weights."""
    if not isinstance(weights, Resting):
        return dict(tensors)
    kept = Resting(weights.room, {})
    kept.update(tensors)
    return kept


def device_of_resting(weights: Mapping[str, Tensor]) -> torch.device:
    """Where the weights are when nobody reads them."""
    return next(iter(where_they_rest(weights).values())).device


def device_of_weights(weights: Mapping[str, Tensor]) -> torch.device:
    """Where the weights are read."""
    return weights.room.device if isinstance(weights, Resting) else next(iter(weights.values())).device


def fitting_together(weights: Mapping[str, Tensor], names: Iterable[Iterable[str]]) -> Iterator[int]:
    """Cuts steps that read weights of these names into stretches whose weights are on the device together.

    Gives the number of steps before each cut. A step that reads more than fits is a stretch of its own.
    """
    if not isinstance(weights, Resting):
        return
    read: set[str] = set()
    for step, own in enumerate(names):
        together = read | set(own)
        if read and together != read and sum(weights.tensors[name].nbytes for name in together) > weights.room.bytes:
            yield step
            together = set(own)
        read = together


def bytes_of_run(model: nn.Module) -> int:
    """What a run holds of a network's weights: the dense ones, those of the pruned network, and its masks."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    return sum(2 * _working_bytes(tensor) + tensor.numel() for tensor in tensors)


def _working_bytes(tensor: Tensor) -> int:
    return tensor.numel() * (torch.float32.itemsize if tensor.dtype in _HALF else tensor.itemsize)
