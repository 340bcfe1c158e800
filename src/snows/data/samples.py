"""Calibration samples: whatever the user has, read once into one table."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from ..errors import ArgumentError, InputError, SnowsWarning

_LABEL_KEYS = {"labels", "label", "target", "targets", "y"}
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
        return [leaf[index] if _has_rows(leaf) else leaf for leaf in self.leaves]

    def _in_place(self, leaf: Any) -> Any:
        if self.place is None or not isinstance(leaf, Tensor):
            return leaf
        device, dtype = self.place
        layout = torch.channels_last if leaf.ndim == 4 else torch.preserve_format
        return leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype, memory_format=layout)


@dataclass(frozen=True)
class _Batch:
    """One batch of the user's data."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    count: int
    labels: Tensor | None


def check_seed(seed: object) -> None:
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise ArgumentError(f"seed is {seed!r}; expected a whole number of at most 64 bits")


def read_samples(calibration: Any, model: nn.Module, with_labels: bool = False) -> Samples:
    """Read a tensor, Dataset, DataLoader or re-iterable of batches (tensors, tuples with the input first, dicts).

    Labels are only read with `with_labels`: the second item of a tuple, or the entry of a dict with such a name.
    """
    signature = inspect.signature(model.forward)
    batches: list[_Batch] = []
    for given in _batches(calibration):
        batch = _read_batch(given, signature, with_labels)
        if batches and batch.spec != batches[0].spec:
            raise InputError("calibration batches differ in their structure; expected the same keys and types in each")
        batches.append(batch)
    count = sum(batch.count for batch in batches)
    if count == 0:
        raise InputError("the calibration data has no batches; give at least one (a few thousand samples work best)")
    leaves = [_join(column) for column in zip(*(batch.leaves for batch in batches), strict=True)]
    labels = [batch.labels for batch in batches if batch.labels is not None]
    samples = Samples(leaves, batches[0].spec, count, torch.cat(labels) if with_labels else None)
    _check_values(samples)
    return samples


def _batches(calibration: Any) -> Iterator[Any]:
    if isinstance(calibration, Tensor | Mapping):
        return iter([calibration])
    if isinstance(calibration, Dataset):
        return iter(DataLoader(calibration, batch_size=_READ_AT_ONCE))
    if isinstance(calibration, Iterator):
        raise InputError(
            "the calibration data is a one-shot generator; give something that can be read again "
            "(a tensor, a list of batches, a Dataset or a DataLoader)"
        )
    if isinstance(calibration, Iterable) and not isinstance(calibration, str | bytes):
        return iter(calibration)
    raise InputError(
        f"the calibration data is a {type(calibration).__name__}; expected a tensor, a Dataset, a DataLoader or "
        "a re-iterable of batches"
    )


def _read_batch(batch: Any, signature: inspect.Signature, with_labels: bool) -> _Batch:
    leaves, spec = pytree.tree_flatten(_call_arguments(batch, signature))
    counts = {leaf.shape[0] for leaf in leaves if _has_rows(leaf)}
    if not counts:
        raise InputError(f"a calibration batch of type {type(batch).__name__} has no tensor with a batch dimension")
    if len(counts) > 1:
        raise InputError(f"the inputs of one calibration batch have {sorted(counts)} samples; expected one number")
    count = counts.pop()
    return _Batch(leaves, spec, count, _labels(batch, count) if with_labels else None)


def _call_arguments(batch: Any, signature: inspect.Signature) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How the model is called: a tensor is its argument, a dict gives keywords, a tuple's first item is the input."""
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), _keywords(batch, signature)
    if isinstance(batch, list | tuple) and batch:
        first = batch[0]
        if isinstance(first, list | tuple):
            return tuple(first), {}
        return _call_arguments(first, signature)
    raise InputError(
        f"a calibration batch is a {type(batch).__name__}; expected a tensor, a tuple with the input first, or a dict"
    )


def _keywords(batch: Mapping[Any, Any], signature: inspect.Signature) -> dict[str, Any]:
    """A dict without its labels, unless the model requires an argument of that name."""
    parameters = signature.parameters
    required = {name for name, p in parameters.items() if p.default is p.empty}
    inputs = {str(k): v for k, v in batch.items() if k in required or k not in _LABEL_KEYS}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [] if takes_any else sorted(set(inputs) - set(parameters))
    if unknown:
        raise InputError(
            f"a calibration batch has the keys {', '.join(unknown)}, which the model's forward does not take "
            f"(it takes {', '.join(sorted(parameters))})"
        )
    return inputs


def _labels(batch: Any, count: int) -> Tensor:
    labels: Any = None
    if isinstance(batch, Mapping):
        labels = next((value for key, value in batch.items() if key in _LABEL_KEYS), None)
    elif isinstance(batch, list | tuple) and len(batch) > 1:
        labels = batch[1]
    if not isinstance(labels, Tensor) or labels.shape != (count,) or labels.is_floating_point():
        what = f"{labels.dtype} of shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else "none"
        raise InputError(
            f"labels='given', but a calibration batch of {count} samples has {what}; expected batches (inputs, labels) "
            "with one whole number for each sample, or a dict with the key 'labels'"
        )
    return labels.detach().cpu().long()


def _join(column: tuple[Any, ...]) -> Any:
    """One leaf of all batches: their rows together, or the value that they share."""
    if not _has_rows(column[0]):
        return column[0]
    if not all(_has_rows(value) for value in column):
        raise InputError("calibration batches differ in their structure; expected the same keys and types in each")
    shapes = {tuple(value.shape[1:]) for value in column}
    if len(shapes) > 1:
        raise InputError(
            f"calibration batches differ in the shape of their samples: {sorted(shapes)}; "
            "resize or pad them to one shape"
        )
    parts = [value.detach().cpu() for value in column]
    return parts[0] if len(parts) == 1 else torch.cat(parts)  # a single batch may be large: no copy


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def _check_values(samples: Samples) -> None:
    for leaf in samples.leaves:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.numel():
            continue
        low, high = (float(end) for end in leaf.aminmax())  # NaN if there is one
        if not math.isfinite(low) or not math.isfinite(high):
            raise InputError("the calibration data contains NaN or infinity; remove those samples")
        if leaf.ndim == 4 and low >= 0 and high > _LARGEST_NORMALIZED:
            warnings.warn(
                f"the calibration images look unnormalized (from {low:g} to {high:g}); "
                "use the same preprocessing as in training",
                SnowsWarning,
                stacklevel=4,
            )
