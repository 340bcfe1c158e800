"""Calibration samples: whatever the user has, read once into one table. Labels are dropped unless asked for."""

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


@dataclass(frozen=True)
class Samples:
    """n samples of a model's inputs: tensors with n rows, and how they are put together for a call of the model."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    count: int
    labels: Tensor | None = None  # one whole number for each sample, where they were asked for
    place: tuple[torch.device, torch.dtype] | None = None  # where rows are wanted; all the samples stay where they are

    def call_arguments(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = pytree.tree_unflatten(self.rows(start, stop), self.spec)
        return args, kwargs

    def rows(self, start: int, stop: int) -> list[Any]:
        return [
            self._placed(leaf[start:stop] if leaf.ndim else leaf) if isinstance(leaf, Tensor) else leaf
            for leaf in self.leaves
        ]

    def _placed(self, leaf: Tensor) -> Tensor:
        if self.place is None:
            return leaf
        device, dtype = self.place
        layout = torch.channels_last if leaf.ndim == 4 else torch.preserve_format
        return leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype, memory_format=layout)

    def split(self, count: int) -> tuple[Samples, Samples]:
        """The first `count` samples, and the others."""

        def part(start: int, stop: int) -> Samples:
            leaves = [leaf[start:stop] if isinstance(leaf, Tensor) and leaf.ndim else leaf for leaf in self.leaves]
            labels = None if self.labels is None else self.labels[start:stop]
            return replace(self, leaves=leaves, count=stop - start, labels=labels)

        return part(0, count), part(count, self.count)

    def moved(self) -> Samples:
        """All of them where rows are wanted."""
        return replace(self, leaves=self.rows(0, self.count))

    @property
    def bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves if isinstance(leaf, Tensor))

    def shuffled(self, seed: int) -> Samples:
        check_seed(seed)
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(seed))
        leaves = [leaf[order] if isinstance(leaf, Tensor) and leaf.ndim else leaf for leaf in self.leaves]
        return replace(self, leaves=leaves, labels=None if self.labels is None else self.labels[order])

    def to(self, device: torch.device, dtype: torch.dtype) -> Samples:
        """The same samples, whose rows come on this device and in this dtype (whole numbers stay)."""
        return replace(self, place=(device, dtype))


def check_seed(seed: object) -> None:
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise ArgumentError(f"seed is {seed!r}; expected a whole number of at most 64 bits")


def read_samples(calibration: Any, model: nn.Module, with_labels: bool = False) -> Samples:
    """From a tensor, Dataset, DataLoader or re-iterable of batches (tensors, tuples with the input first, dicts).

    Labels, where they are asked for, are the second item of a tuple or the entry of a dict that is named so.
    """
    signature = inspect.signature(model.forward)
    tables: list[list[Any]] = []
    spec: pytree.TreeSpec | None = None
    count = 0
    labels: list[Tensor] = []
    for batch in _batches(calibration):
        call = _call_arguments(batch, signature)
        leaves, this = pytree.tree_flatten(call)
        sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim}
        if not sizes:
            raise InputError(f"a calibration batch of type {type(batch).__name__} has no tensor with a batch dimension")
        if len(sizes) > 1:
            raise InputError(f"the inputs of one calibration batch have {sorted(sizes)} samples; expected one number")
        if spec is not None and this != spec:
            raise InputError("calibration batches differ in their structure; expected the same keys and types in each")
        spec = this
        tables.append(leaves)
        count += (size := sizes.pop())
        if with_labels:
            labels.append(_labels(batch, size))
    if spec is None or count == 0:
        raise InputError("the calibration data has no batches; give at least one (a few thousand samples work best)")
    leaves = [_join(column) for column in zip(*tables, strict=True)]
    samples = Samples(leaves, spec, count, torch.cat(labels) if with_labels else None)
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


def _call_arguments(batch: Any, signature: inspect.Signature) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How the model is called: a tensor is its argument, a dict gives keywords, a tuple's first item is the input."""
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        parameters = signature.parameters
        required = {name for name, p in parameters.items() if p.default is p.empty}  # an input, whatever its name
        inputs = {str(k): v for k, v in batch.items() if k in required or k not in _LABEL_KEYS}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        unknown = [] if takes_any else sorted(set(inputs) - set(parameters))
        if unknown:
            raise InputError(
                f"a calibration batch has the keys {', '.join(unknown)}, which the model's forward does not take "
                f"(it takes {', '.join(sorted(parameters))})"
            )
        return (), inputs
    if isinstance(batch, list | tuple) and batch:
        first = batch[0]
        if isinstance(first, list | tuple):
            return tuple(first), {}
        return _call_arguments(first, signature)
    raise InputError(
        f"a calibration batch is a {type(batch).__name__}; expected a tensor, a tuple with the input first, or a dict"
    )


def _labels(batch: Any, size: int) -> Tensor:
    found: Any = None
    if isinstance(batch, Mapping):
        found = next((value for key, value in batch.items() if key in _LABEL_KEYS), None)
    elif isinstance(batch, list | tuple) and len(batch) > 1:
        found = batch[1]
    if not isinstance(found, Tensor) or found.shape != (size,) or found.is_floating_point():
        what = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else "none"
        raise InputError(
            f"labels='given', but a calibration batch of {size} samples has {what}; expected batches (inputs, labels) "
            "with one whole number for each sample, or a dict with the key 'labels'"
        )
    return found.detach().cpu().long()


def _join(column: tuple[Any, ...]) -> Any:
    if not isinstance(column[0], Tensor) or not column[0].ndim:
        return column[0]
    shapes = {tuple(value.shape[1:]) for value in column}
    if len(shapes) > 1:
        raise InputError(
            f"calibration batches differ in the shape of their samples: {sorted(shapes)}; "
            "resize or pad them to one shape"
        )
    parts = [value.detach().cpu() for value in column]
    return parts[0] if len(parts) == 1 else torch.cat(parts)  # no copy of what may be large


def _check_values(samples: Samples) -> None:
    for leaf in samples.leaves:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.numel():
            continue
        low, high = (float(end) for end in leaf.aminmax())  # NaN where there is one
        if not math.isfinite(low) or not math.isfinite(high):
            raise InputError("the calibration data contains NaN or infinity; remove those samples")
        if leaf.ndim == 4 and low >= 0 and high > 16:
            warnings.warn(
                f"the calibration images look unnormalized (from {low:g} to {high:g}); "
                "use the same preprocessing as in training",
                SnowsWarning,
                stacklevel=4,
            )
