"""What tells samples from others: all of a table, a few of a Dataset, the first batch of other loaders."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from snows.training.feeding import read_feeds

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
OTHERS = X + 1


class Rows(Dataset[Tensor]):
    """Samples, and what is added to each of them whenever it is read."""

    def __init__(self, x: Tensor, noise: Callable[[], float] = float) -> None:
        self.x, self.noise, self.read = x, noise, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        self.read += 1
        return self.x[index] + self.noise()


class Stream(IterableDataset[Tensor]):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.x)


class Batches:
    """No DataLoader at all."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.x.split(16))


def identity(data: Any) -> Any:
    torch.rand(3)  # the random numbers of before play no part
    training, _ = read_feeds(data, X, nn.Linear(8, 3), 16, 0, with_labels=False)
    return training.identity()


def torch_noise() -> float:
    return float(torch.rand(()))


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "table": lambda x: x,
    "dataset": Rows,
    "random views": lambda x: Rows(x, torch_noise),
    "loader": lambda x: DataLoader(Rows(x), 16),
    "loader that shuffles": lambda x: DataLoader(Rows(x), 16, shuffle=True),
    "loader with its own order": lambda x: DataLoader(Rows(x), 16, shuffle=True, generator=torch.Generator()),
    "loader without batches": lambda x: DataLoader(Batched(x), batch_size=None),
    "stream": lambda x: DataLoader(Stream(x), 16),
    "batches": Batches,
}


class Batched(Rows):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return self.x[20 * index : 20 * index + 20]


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_told_from_others(kind: str) -> None:
    make = KINDS[kind]
    data = make(X)
    assert str(identity(data)) == str(identity(data)) == str(identity(make(X)))
    assert str(identity(make(OTHERS))) != str(identity(data))


@pytest.mark.parametrize("kind", ["table", "dataset", "loader", "loader that shuffles"])
def test_fewer_samples_are_other_samples(kind: str) -> None:
    same = X[:1].expand(40, 8)
    assert str(identity(KINDS[kind](same))) != str(identity(KINDS[kind](same[:39])))


def test_samples_that_are_new_every_time_are_not_compared() -> None:
    data = Rows(X, random.random)
    assert identity(data) == identity(data) == ["DataLoader", 40, 3, 16, "new every time"]


def test_few_samples_are_read_from_everywhere() -> None:
    data = Rows(torch.randn(1000, 8))
    before = identity(data)
    assert data.read == 2 * 16
    data.x[-1] += 1
    assert identity(data) != before
