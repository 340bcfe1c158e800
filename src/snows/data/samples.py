"""Calibration samples: whatever the user has, read once into one table."""

from __future__ import annotations

import inspect
import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..devices.device import placed
from ..devices.distributed.ranks import Ranks
from ..errors import ArgumentError, InputError, SnowsWarning, shown
from .batches import batches_of, call_arguments, has_rows, labels_of, require_usable, sample_count
from .usable import signature_of

_READ_AT_ONCE = 256
_LARGEST_NORMALIZED = 16  # normalized pixels stay far below


@dataclass(frozen=True)
class Samples:
    """A table of samples, in the form in which the model takes them.

    leaves  the inputs of the model, flattened: tensors with one row per sample, and values that all samples share
    spec    how leaves are put together for a call of the model
    count   number of samples
    labels  one class per sample, or None if labels were not asked for
    place   device and dtype in which rows are returned; None: as they are stored
    """

    leaves: list[Any]
    spec: pytree.TreeSpec
    count: int
    labels: Tensor | None = None
    place: tuple[torch.device, torch.dtype] | None = None

    @property
    def bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves if isinstance(leaf, Tensor))

    def call_arguments(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call of the model on the samples from `start` to `stop`."""
        args, kwargs = pytree.tree_unflatten(self.rows(start, stop), self.spec)
        return args, kwargs

    def rows(self, start: int, stop: int) -> list[Any]:
        """The leaves of the samples from `start` to `stop`, in the wanted place."""
        return [self._in_place(leaf) for leaf in self._select(slice(start, stop))]

    def at(self, indices: Tensor) -> list[Any]:
        """The leaves of some samples, in any order, in the wanted place."""
        return [self._in_place(leaf) for leaf in self._select(indices)]

    def at_shared(self, indices: Tensor, ranks: Ranks) -> list[Any]:
        """The same for several ranks, which share the samples. All of them ask for the same ones."""
        return self.at(indices)

    def stored(self, index: int) -> list[Any]:
        """The leaves of one sample as they were given, and its label."""
        return [*self._select(slice(index, index + 1)), None if self.labels is None else self.labels[index]]

    def split(self, count: int) -> tuple[Samples, Samples]:
        """The first `count` samples, and the others."""
        return self._part(slice(0, count), count), self._part(slice(count, self.count), self.count - count)

    def shuffled(self, seed: int) -> Samples:
        check_seed(seed)
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(seed))
        return self._part(order, self.count)

    def to(self, device: torch.device, dtype: torch.dtype) -> Samples:
        """The same samples, whose rows come on this device, floating-point ones in this dtype. Nothing moves yet."""
        return replace(self, place=(device, dtype))

    def moved(self) -> Samples:
        """The same samples, stored in the wanted place."""
        return replace(self, leaves=self.rows(0, self.count))

    def _part(self, index: slice | Tensor, count: int) -> Samples:
        labels = None if self.labels is None else self.labels[index]
        return replace(self, leaves=self._select(index), count=count, labels=labels)

    def _select(self, index: slice | Tensor) -> list[Any]:
        return [leaf[index] if has_rows(leaf) else leaf for leaf in self.leaves]

    def _in_place(self, leaf: Any) -> Any:
        return leaf if self.place is None else placed(leaf, *self.place, torch.channels_last)


@dataclass(frozen=True)
class Batch:
    """One batch of the user's data."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    count: int
    labels: Tensor | None


def check_seed(seed: object) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**64:
        raise ArgumentError(f"seed is {shown(seed)}; expected a whole number of at most 64 bits")


def check_count(name: str, value: object, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(f"{name} is {shown(value)}; expected a whole number of at least {least}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} is {shown(value)}; expected True or False")


def check_labels(labels: object) -> None:
    """The word that says where labels come from."""
    if not (isinstance(labels, str) and labels in ("model", "given")):
        raise ArgumentError(f"labels is {shown(labels)}; expected 'model' or 'given'")


def read_samples(data: Any, model: nn.Module, with_labels: bool = False, what: str = "calibration") -> Samples:
    """Read a tensor, Dataset, DataLoader or re-iterable of batches (tensors, tuples with the input first, dicts).

    Labels are only read with `with_labels`: the second item of a tuple, or the entry of a dict with such a name. `what`
    the samples are for is said in messages.
    """
    signature = signature_of(model)
    batches: list[Batch] = []
    for given in batches_of(data, what, _READ_AT_ONCE):
        batch = read_batch(given, signature, with_labels, what)
        if batches and batch.spec != batches[0].spec:
            raise InputError(f"{what} batches differ in their structure; expected the same keys and types in each")
        batches.append(batch)
    count = sum(batch.count for batch in batches)
    if count == 0:
        raise InputError(f"the {what} data has no batches; give at least one (a few thousand samples work best)")
    leaves = [_join(column, what) for column in zip(*(batch.leaves for batch in batches), strict=True)]
    labels = [batch.labels for batch in batches if batch.labels is not None]
    samples = Samples(leaves, batches[0].spec, count, torch.cat(labels) if with_labels else None)
    check_values(samples, what)
    return samples


def read_batch(batch: Any, signature: inspect.Signature, with_labels: bool, what: str) -> Batch:
    leaves, spec = pytree.tree_flatten(call_arguments(batch, signature, what))
    require_usable(leaves, what)
    count = sample_count(leaves, f"a {what} batch of type {type(batch).__name__}")
    return Batch(leaves, spec, count, _labels(batch, count, what) if with_labels else None)


def _labels(batch: Any, count: int, kind: str) -> Tensor:
    labels = labels_of(batch)
    if not isinstance(labels, Tensor) or labels.shape != (count,) or labels.is_floating_point():
        what = f"{labels.dtype} of shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else "none"
        raise InputError(
            f"labels are needed, but a {kind} batch of {count} samples has {what}; expected batches (inputs, labels) "
            "with one whole number for each sample, or a dict with the key 'labels'"
        )
    return labels.detach().cpu().long()


def _join(column: tuple[Any, ...], what: str) -> Any:
    """One leaf of all batches: their rows together, or the value that they share."""
    if not has_rows(column[0]):
        return column[0]
    if not all(has_rows(value) for value in column):
        raise InputError(f"{what} batches differ in their structure; expected the same keys and types in each")
    shapes = {tuple(value.shape[1:]) for value in column}
    if len(shapes) > 1:
        raise InputError(
            f"{what} batches differ in the shape of their samples: {sorted(shapes)}; resize or pad them to one shape"
        )
    parts = [value.detach().cpu() for value in column]
    return parts[0] if len(parts) == 1 else torch.cat(parts)  # a single batch may be large: no copy


def check_values(samples: Samples, what: str) -> None:
    for leaf in samples.leaves:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.numel():
            continue
        low, high = (float(end) for end in leaf.aminmax())  # NaN if there is one
        if not math.isfinite(low) or not math.isfinite(high):
            raise InputError(f"the {what} data contains NaN or infinity; remove those samples")
        if leaf.ndim == 4 and low >= 0 and high > _LARGEST_NORMALIZED:
            warnings.warn(
                f"the {what} images look unnormalized (from {low:g} to {high:g}); "
                "use the same preprocessing as in training",
                SnowsWarning,
                stacklevel=4,
            )
