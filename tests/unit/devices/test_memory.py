"""How memory is shared out, how much a run may use by default, and sizes as people write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from snows.devices import memory
from snows.devices.memory import Memory, as_bytes, least_of, memory_limits
from snows.errors import ArgumentError

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30


# Shares


def test_shares_of_a_budget() -> None:
    budget = Memory(1000)
    assert budget.held == 500
    assert budget.products == 200
    assert budget.chunk == 40  # a fifth of the products: inverting takes five copies
    assert budget.one_pass == budget.choosing == 300
    assert budget.factors == 100
    assert budget.held + budget.one_pass + budget.factors <= budget.total
    assert budget.held + budget.products + budget.factors <= budget.total


@pytest.mark.parametrize(
    ("wanted", "sample_bytes", "piece", "taken"),
    [
        (50, 4, 20, 50),  # all fit: 200 bytes
        (51, 4, 60, 50),  # one does not; within one piece
        (60, 4, 20, 40),  # whole pieces
        (60, 4, 50, 50),
        (60, 4, 49, 49),
        (80, 4, 20, 40),  # half of the samples will do
        (81, 4, 20, 81),  # less than a half fits: then all, linearized for each product
        (101, 4, 60, 101),
        (100, 4, 60, 50),
        (7, 0, 3, 7),  # nothing is held
        (150, 0, 3, 150),
        (150, 1, 3, 150),
        (7, 1000, 3, 7),
    ],
)
def test_products_take_as_many_samples_as_fit(wanted: int, sample_bytes: int, piece: int, taken: int) -> None:
    assert Memory(1000).fitting_samples(wanted, sample_bytes, piece) == taken


@pytest.mark.parametrize(
    ("live", "samples", "resident", "targets"),
    [
        (1, 40, 40, 420), (1, 250, 250, 0), (1, 251, 250, 0), (10, 40, 25, 0), (12, 40, 20, 20), (1000, 40, 0, 500),
        (0, 40, 40, 500), (0, 400, 400, 500),
    ],
)  # fmt: skip
def test_activations_of_both_streams_come_first_then_targets(
    live: int, samples: int, resident: int, targets: int
) -> None:
    budget = Memory(1000)
    assert budget.resident(live, samples) == resident
    assert budget.targets(live, samples) == targets


def test_the_host_takes_what_the_device_does_not() -> None:
    assert [Memory(9, host=200).hosted(live) for live in (0, 1, 10, 99, 100, 101)] == [200, 100, 10, 1, 1, 0]
    assert Memory(1000).hosted(1000) > 1 << 40


# Budgets


@pytest.mark.parametrize(("host", "total"), [(64 * GIB, 16 * GIB), (16 * GIB, 16 * GIB), (7 * GIB, 7 * GIB)])
def test_on_a_cpu_the_default_is_16_gib_or_what_the_host_has(
    host: int, total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is free at the moment does not matter, so that runs can be repeated bit for bit."""
    monkeypatch.setattr(memory, "_host_bytes", lambda: host)
    assert memory_limits(CPU) == Memory(total, host=0)  # what does not fit goes to disk


def test_on_a_gpu_the_default_is_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch has reserved and does not use is free as well."""
    monkeypatch.setattr(memory, "_host_bytes", lambda: 100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert memory_limits(GPU) == Memory(5500, host=50)
    assert memory_limits(GPU, 1234) == Memory(1234, host=50)


def test_other_devices_have_the_cpus_default_and_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_host_bytes", lambda: 32 * GIB)
    assert memory_limits(torch.device("xpu")) == Memory(16 * GIB, host=16 * GIB)
    assert memory_limits(CPU, 1000) == Memory(1000, host=0)


@pytest.mark.parametrize(("limit", "expected"), [(None, 8000), ("max", 8000), ("5000", 5000), ("9000", 8000)])
def test_the_hosts_memory_is_what_the_container_may_use(
    limit: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "memory.max"
    if limit is not None:
        file.write_text(f"{limit}\n")
    monkeypatch.setattr(memory, "Path", lambda path: file)
    monkeypatch.setattr(memory.os, "sysconf", {"SC_PAGE_SIZE": 4, "SC_PHYS_PAGES": 2000}.__getitem__)
    assert memory._host_bytes() == expected


def test_this_host_has_a_plausible_size() -> None:
    assert 2**28 < memory._host_bytes() < 2**48


# Sizes


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("24GiB", 24 * 2**30), ("24 gib", 24 * 2**30), ("800MB", 800 * 10**6), ("1.5k", 1500), ("512", 512),
        ("1e9", 10**9), (4096, 4096), ("2Ti", 2 * 2**40), (None, None), (" 3 kb ", 3000), ("2KiB", 2048),
        ("1mib", 2**20), ("1g", 10**9), ("1T", 10**12), ("1", 1), (1, 1), ("0.5k", 500), ("1b", 1),
        (10**400, 1 << 62), ("1e30", 1 << 62),
    ],
)  # fmt: skip
def test_sizes_as_people_write_them(given: Any, size: int | None) -> None:
    assert as_bytes(given) == size


@pytest.mark.parametrize(
    "given", ["", "lots", "-1GiB", "0", 0, -5, True, 2.5, "1e999", "24 gigs", "GiB", "9" * 400, "0.5", "1 2"]
)
def test_other_words_are_refused(given: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^memory is .*; expected a size such as '24GiB', or a number of bytes$"):
        as_bytes(given)


# Weights


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (0, Memory(1000, host=50)),
        (500, Memory(500, host=50)),
        (501, Memory(500, host=50, room=500)),
        (10**9, Memory(500, host=50, room=500)),
    ],
)
def test_weights_are_part_of_a_budget_and_rest_if_they_take_more_than_half(
    weights: int, expected: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_host_bytes", lambda: 100)
    assert memory_limits(GPU, 1000, weights=weights) == expected


@pytest.mark.parametrize(("weights", "room"), [(50 * GIB, None), (51 * GIB, 8 * GIB)])
def test_on_a_cpu_the_default_is_beside_the_weights(
    weights: int, room: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_host_bytes", lambda: 100 * GIB)
    assert memory_limits(CPU, weights=weights) == Memory(16 * GIB, host=0, room=room)


def test_all_ranks_let_weights_rest_in_the_least_room() -> None:
    assert least_of([Memory(5, 3, 4), Memory(6, 2, 3)]) == Memory(5, 2, 3)
    assert least_of([Memory(5, 3), Memory(6, 2)]) == Memory(5, 2)
    assert least_of([Memory(5, 3), Memory(6, 2, 7)]).room == 7  # one of them has to
