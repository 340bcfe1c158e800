"""What retraining reads: training batches in a new order every epoch, and held-out samples.

Samples in memory (a tensor, a dict, batches in a list, a TensorDataset) become one table, which is on the device if it
fits. A Dataset is read by a DataLoader of ours, and any other loader as it is, with its own order and batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from ..data.batches import Call, calls
from ..data.samples import Samples, read_samples
from ..devices.memory import memory_limits
from ..errors import ArgumentError, InputError, a_type, shown
from ..graph.kind import is_image
from ..results.folder import digest

_TABLE_SHARE = 0.25  # of the free memory of the device
_WHOLE = 1 << 62  # batches of loaders are taken as they are
_LOOKED_AT = 16  # samples by which a Dataset is told from others


class Feed(ABC):
    """Samples in batches.

    samples  how many; None: only reading them would tell
    steps    batches of an epoch; None: only reading them would tell
    """

    samples: int | None
    steps: int | None

    @abstractmethod
    def epoch(self, generator: torch.Generator | None) -> Iterator[Call]:
        """All batches once, in random order by this generator; None: in the order of the samples."""

    @property
    def labels(self) -> Tensor | None:
        """The labels of all samples; None if they come with the batches, or there are none."""
        return None

    @abstractmethod
    def identity(self) -> list[Any]:
        """What tells these samples from others, for `digest`."""


@dataclass(frozen=True)
class TableFeed(Feed):
    """Samples in memory."""

    table: Samples
    batch: int

    @property
    def samples(self) -> int:  # type: ignore[override]  # the number is known here
        return self.table.count

    @property
    def steps(self) -> int:  # type: ignore[override]
        return -(-self.table.count // self.batch)

    @property
    def labels(self) -> Tensor | None:
        return self.table.labels

    def epoch(self, generator: torch.Generator | None) -> Iterator[Call]:
        count = self.table.count
        order = torch.arange(count) if generator is None else torch.randperm(count, generator=generator)
        places = {leaf.device: order.to(leaf.device) for leaf in self._tensors()}
        for start in range(0, count, self.batch):
            chosen = {device: rows[start : start + self.batch] for device, rows in places.items()}
            yield self._call(chosen, min(self.batch, count - start))

    def _call(self, chosen: Mapping[torch.device, Tensor], count: int) -> Call:
        leaves = [
            leaf[chosen[leaf.device]] if isinstance(leaf, Tensor) and leaf.ndim else leaf for leaf in self.table.leaves
        ]
        labels = None if self.table.labels is None else self.table.labels[chosen[self.table.labels.device]]
        args, kwargs = pytree.tree_unflatten(leaves, self.table.spec)
        return Call(args, kwargs, labels, count)

    def _tensors(self) -> list[Tensor]:
        leaves = [*self.table.leaves, self.table.labels]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]

    def identity(self) -> list[Any]:
        return [*self.table.leaves, self.table.labels]

    def placed(self, device: torch.device, dtype: torch.dtype) -> TableFeed:
        """The same samples on the device, if they take no more than a share of it."""
        if device.type == "cpu" or self.table.bytes > _TABLE_SHARE * memory_limits(device).total:
            return self
        labels = None if self.table.labels is None else self.table.labels.to(device)
        return replace(self, table=replace(self.table.to(device, dtype).moved(), labels=labels, place=None))


@dataclass(frozen=True)
class StreamFeed(Feed):
    """Batches of a loader, read again for every epoch."""

    loader: Any
    model: nn.Module
    samples: int | None = None

    @property
    def steps(self) -> int | None:  # type: ignore[override]
        try:
            return len(self.loader)
        except TypeError:  # it has no length, or that of its data is not known
            return None

    def epoch(self, generator: torch.Generator | None) -> Iterator[Call]:
        return calls(self.loader, self.model, batch=_WHOLE)

    def identity(self) -> list[Any]:
        data, batch = _dataset_of(self.loader), getattr(self.loader, "batch_size", None)
        first, again = (self._look() for _ in range(2))
        seen = first if first == again else "new every time"
        return [type(self.loader).__name__, None if data is None else len(data), self.steps, batch, seen]

    def _look(self) -> str:
        """A digest of a few samples, spread over a Dataset; else of the first batch."""
        torch.default_generator.manual_seed(0)  # of views and of the order, where these are torch's
        call = next(calls(_few(self.loader), self.model, batch=_WHOLE))
        leaves = pytree.tree_leaves((call.args, call.kwargs, call.labels))
        return digest([leaf for leaf in leaves if isinstance(leaf, Tensor)])


def _dataset_of(loader: Any) -> Any:
    """The Dataset of a DataLoader; None if it has no places to read at, or the loader is another one."""
    data: Any = loader.dataset if isinstance(loader, DataLoader) and loader.batch_sampler is not None else None
    return None if isinstance(data, IterableDataset) or not hasattr(data, "__len__") or not len(data) else data


def _few(loader: Any) -> Any:
    """A loader of one batch, with samples from everywhere in the Dataset. Without a Dataset the loader as it is."""
    data = _dataset_of(loader)
    if data is None:
        return loader
    last = len(data) - 1
    places = sorted({round(last * part / (_LOOKED_AT - 1)) for part in range(_LOOKED_AT)})
    return DataLoader(Subset(data, places), batch_size=len(places), collate_fn=loader.collate_fn)


def read_feeds(
    data: Any, held_out: Any, model: nn.Module, batch: int, seed: int, with_labels: bool
) -> tuple[Feed, Feed]:
    """What to train on, and what to judge by: `held_out` is a share of the data, or samples of its own."""
    share = _share(held_out)
    table = _in_memory(data)
    if table is not None:
        samples = read_samples(table, model, with_labels, "training")
        training: Feed = TableFeed(samples, batch)
        if share is not None:
            count = _held_out_count(samples.count, share)
            judging, fitted = samples.shuffled(seed).split(count)
            return TableFeed(fitted, batch), TableFeed(judging, batch)
    elif isinstance(data, Dataset) and hasattr(data, "__len__"):
        if share is not None:
            count = _held_out_count(len(data), share)
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
            return (
                _dataset(Subset(data, order[count:]), model, batch, shuffle=True),
                _dataset(Subset(data, order[:count]), model, batch, shuffle=False),
            )
        training = _dataset(data, model, batch, shuffle=True)
    else:
        if share is not None:
            raise ArgumentError(
                f"held_out is {shown(held_out)}, but the training data is {a_type(data)}, from which no "
                "share can be held out; give held_out= samples of its own"
            )
        training = _stream(data, model, batch)
    return training, _judging(held_out, model, batch, with_labels)


def _judging(held_out: Any, model: nn.Module, batch: int, with_labels: bool) -> Feed:
    table = _in_memory(held_out)
    if table is not None:
        return TableFeed(read_samples(table, model, with_labels, "held-out"), batch)
    if isinstance(held_out, Dataset) and hasattr(held_out, "__len__"):
        return _dataset(held_out, model, batch, shuffle=False)
    return _stream(held_out, model, batch)


def _share(held_out: Any) -> float | None:
    """The share of the data that is held out; None: it is data itself."""
    if isinstance(held_out, bool) or not isinstance(held_out, int | float):
        return None
    if not 0 < held_out < 1:
        raise ArgumentError(f"held_out is {shown(held_out)}; expected a share between 0 and 1, or samples")
    return float(held_out)


def _held_out_count(samples: int, share: float) -> int:
    count = round(share * samples)
    if not 0 < count < samples:
        raise InputError(
            f"a share of {share:g} of {samples} samples holds out {count} of them; give more samples, another share, "
            "or held_out= samples of its own"
        )
    return count


def _in_memory(data: Any) -> Any:
    """Data that `read_samples` may copy as a whole; None if it must be read batch by batch."""
    if isinstance(data, TensorDataset):
        return [data.tensors]
    if isinstance(data, tuple):  # one batch: inputs and labels
        return [data]
    return data if isinstance(data, Tensor | Mapping | list) else None


def _dataset(dataset: Any, model: nn.Module, batch: int, shuffle: bool) -> StreamFeed:
    loader: Any = DataLoader(dataset, batch_size=batch, shuffle=shuffle)
    return StreamFeed(loader, model, len(dataset))


def _stream(data: Any, model: nn.Module, batch: int) -> StreamFeed:
    return StreamFeed(DataLoader(data, batch_size=batch) if isinstance(data, Dataset) else data, model)


def augmented(call: Call, crop: int, flip: bool, generator: torch.Generator) -> Call:
    """The same call on random crops of its images, which get a border of `crop` zeros first, and mirror images."""
    if not crop and not flip:
        return call
    found = [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if is_image(leaf)]
    if not found:
        raise ArgumentError("crop and flip are for images (samples x channels x height x width); the inputs are none")
    offsets = torch.randint(2 * crop + 1, (2, call.count), generator=generator)
    mirrored = torch.rand(call.count, generator=generator) < 0.5 if flip else torch.zeros(call.count, dtype=torch.bool)

    def view(leaf: Any) -> Any:
        return _views(leaf, crop, offsets, mirrored) if is_image(leaf) else leaf

    args, kwargs = pytree.tree_map(view, (call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs)


def _views(images: Tensor, crop: int, offsets: Tensor, mirrored: Tensor) -> Tensor:
    device, (height, width) = images.device, images.shape[2:]
    offsets, mirrored = offsets.to(device), mirrored.to(device)
    across = torch.arange(width, device=device)
    rows = offsets[0, :, None] + torch.arange(height, device=device)
    columns = offsets[1, :, None] + torch.where(mirrored[:, None], across.flip(0), across)
    padded = F.pad(images, [crop] * 4)
    sample = torch.arange(len(images), device=device)[:, None, None]
    return padded[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)  # indexing puts channels last
