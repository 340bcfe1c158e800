"""A Dataset whose samples are read when they are first needed: each of several ranks reads its share."""

from __future__ import annotations

import inspect
from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, Subset

from ..devices.distributed.ranks import Ranks
from .batches import has_rows
from .samples import Samples, check_values, read_batch
from .usable import signature_of

_WHAT = "calibration"  # in messages
_TOO_MANY = 1 << 62  # bytes: it is never moved to a device as a whole


def can_be_shared(data: Any) -> bool:
    """Whether samples can be read one by one, in any order."""
    return isinstance(data, Dataset) and isinstance(data, Sized) and len(data) > 0


def read_in_shares(data: Any, model: nn.Module) -> Samples:
    """The samples of a Dataset, none of them read but the first."""
    reader = _Reader(data, signature_of(model))
    leaves = reader.leaves([0])
    assert reader.spec is not None
    return DatasetSamples(leaves, reader.spec, len(data), order=torch.arange(len(data)), reader=reader)


class _Reader:
    """Reads samples of a Dataset once, and keeps them."""

    def __init__(self, dataset: Dataset[Any], signature: inspect.Signature) -> None:
        self._dataset, self._signature = dataset, signature
        self._kept: dict[int, list[Any]] = {}
        self.spec: pytree.TreeSpec | None = None  # of the batches

    def leaves(self, indices: Sequence[int]) -> list[Any]:
        """The leaves of these samples, one row for each."""
        missing = [index for index in dict.fromkeys(indices) if index not in self._kept]
        if missing:
            (given,) = DataLoader(Subset(self._dataset, missing), batch_size=len(missing))
            batch = read_batch(given, self._signature, False, _WHAT)
            check_values(Samples(batch.leaves, batch.spec, batch.count), _WHAT)
            self.spec = batch.spec
            for row, index in enumerate(missing):
                self._kept[index] = [
                    leaf[row].detach().cpu().clone() if has_rows(leaf) else leaf for leaf in batch.leaves
                ]
        rows = zip(*(self._kept[index] for index in indices), strict=True)
        return [torch.stack(column) if isinstance(column[0], Tensor) else column[0] for column in rows]


@dataclass(frozen=True)
class DatasetSamples(Samples):
    """Samples of a Dataset. `order` has their places in it. `leaves` are those of the first few, as an example."""

    order: Tensor = None  # type: ignore[assignment]  # fields of the base have defaults
    reader: _Reader = None  # type: ignore[assignment]

    @property
    def bytes(self) -> int:
        return _TOO_MANY

    def at_shared(self, indices: Tensor, ranks: Ranks) -> list[Any]:
        """Every row is read by the rank that has it anyway, and sent to the others."""
        own = torch.tensor([ranks.owns(int(index)) for index in indices])
        first = self._select(slice(0, 1))

        def zeros() -> list[Tensor]:
            rows = [leaf for leaf in first if isinstance(leaf, Tensor)]
            return [torch.zeros(len(indices), *row.shape[1:], dtype=_summable(row.dtype)) for row in rows]

        def read() -> list[Tensor]:
            tables = zeros()
            if own.any():
                found = [leaf for leaf in self._select(indices[own]) if isinstance(leaf, Tensor)]
                for table, rows in zip(tables, found, strict=True):
                    table[own] = rows.to(table.dtype)
            return tables

        sums = iter(ranks.sums(read, zeros))
        leaves = [next(sums).to(leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in first]
        return [self._in_place(leaf) for leaf in leaves]

    def _part(self, index: slice | Tensor, count: int) -> Samples:
        return replace(self, order=self.order[index], count=count)

    def _select(self, index: slice | Tensor) -> list[Any]:
        return self.reader.leaves(self.order[index].tolist())


def _summable(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype == torch.bool else dtype
