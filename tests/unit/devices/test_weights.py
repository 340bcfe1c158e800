"""Weights that rest outside of a device: what is copied, what stays, and that the room is never overfilled."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from snows.devices import offload
from snows.devices.weights import (
    Resting,
    Room,
    bytes_of_run,
    device_of_resting,
    device_of_weights,
    fitting_together,
    kept_as,
    rest,
    where_they_rest,
)

DEVICE = torch.device("meta")  # the one that every machine has beside its CPU


@pytest.fixture(autouse=True)
def back_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of this device have no values that could be copied back."""
    monkeypatch.setattr("snows.devices.weights._on_host", lambda tensor: torch.ones(tensor.shape))


def resting(sizes: dict[str, int], room: int) -> Resting:
    return Resting(Room(DEVICE, room), {name: torch.zeros(size // 4) for name, size in sizes.items()})


@pytest.mark.parametrize("room", [0, 3, 100, 260, 400, 10_000])
def test_copies_never_take_more_than_their_room(room: int) -> None:
    weights = resting({str(number): 4 * (1 + number % 40) for number in range(100)}, room)
    generator = torch.Generator().manual_seed(0)
    for step in range(1000):
        name = str(int(torch.randint(100, (), generator=generator)))
        if step % 3:
            assert weights[name].device == DEVICE
        else:
            weights[name] = torch.zeros(1 + step % 70, device=DEVICE)
            assert weights.tensors[name].device.type == "cpu"
        copies = [copy for _, copy in weights.room._copies.values()]
        assert sum(copy.nbytes for copy in copies) == weights.room.held <= room


def test_the_most_recent_copies_stay() -> None:
    weights = resting({"a": 40, "b": 40, "c": 40, "large": 200}, room=80)
    a, b = weights["a"], weights["b"]
    assert weights["a"] is a
    c = weights["c"]  # in place of b, which was read before a
    assert weights["a"] is a
    assert weights["c"] is c
    assert weights["b"] is not b
    large = weights["large"]  # does not fit
    assert weights["large"] is not large
    assert weights.room.held == 0


def test_what_is_set_rests_and_stays_as_a_copy() -> None:
    weights = resting({"a": 40, "b": 40}, room=80)
    before = weights["a"]
    new = torch.zeros(10, device=DEVICE)
    weights["a"] = new
    assert weights["a"] is new is not before
    on_host = torch.ones(10)
    weights["b"] = on_host
    assert weights.tensors["b"] is on_host
    assert weights["b"].device == DEVICE
    del weights["b"]
    assert "b" not in weights
    assert list(weights) == ["a"]
    assert len(weights) == 1


def test_two_mappings_share_tensors_until_one_changes() -> None:
    dense = resting({"a": 40}, room=80)
    current = copy.copy(dense)
    assert current["a"] is dense["a"]
    current["a"] = torch.ones(10, device=DEVICE)
    assert current["a"] is not dense["a"]
    assert dense.tensors["a"].sum() == 0


def test_looking_for_a_name_copies_nothing() -> None:
    weights = resting({"a": 40}, room=80)
    assert "a" in weights
    assert "b" not in weights
    assert weights.room.held == 0


def test_where_the_work_is_done_on_the_cpu_weights_rest_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(
        "snows.devices.weights.on_disk", lambda value: written.append(value.nbytes) or offload.on_disk(value)
    )
    given, new = torch.zeros(3000), torch.randn(3000)
    weights = Resting(Room(torch.device("cpu"), 10), {"a": given})
    assert weights["a"] is given  # nothing is copied
    kept = kept_as(weights, {"b": new})
    assert written == [new.nbytes]
    assert torch.equal(kept["b"], new)
    assert kept["b"].data_ptr() != new.data_ptr()
    assert weights.room.held == 0


def test_of_a_dict_all_weights_are_on_their_device() -> None:
    plain: dict[str, Tensor] = {"a": torch.zeros(2, device=DEVICE)}
    assert not rest(plain)
    assert where_they_rest(plain) is plain
    assert device_of_weights(plain) == device_of_resting(plain) == DEVICE
    assert type(kept_as(plain, plain)) is dict
    assert list(fitting_together(plain, [["a"], ["a"]])) == []
    other = resting({"a": 40}, room=0)
    assert rest(other)
    assert where_they_rest(other) is other.tensors
    assert (device_of_weights(other), device_of_resting(other).type) == (DEVICE, "cpu")


@pytest.mark.parametrize(
    ("room", "cuts"), [(1000, []), (120, []), (119, [3]), (80, [3]), (60, [2, 3]), (40, [1, 3]), (0, [1, 2, 3])]
)
def test_stretches_of_steps_read_what_fits_together(room: int, cuts: list[int]) -> None:
    weights = resting({"a": 40, "b": 20, "c": 20, "d": 40}, room)
    steps = [["a"], ["b"], ["c", "b"], ["d"], [], ["d"]]
    assert list(fitting_together(weights, steps)) == cuts


def test_the_bytes_of_a_run_are_those_of_two_networks_and_the_masks() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    numbers, counter = 4 * 3 + 3 + 4 * 3, 1
    assert bytes_of_run(model) == numbers * (4 + 4 + 1) + counter * (8 + 8 + 1)
    assert bytes_of_run(model.half()) == bytes_of_run(model.float())  # a run computes in float32
    model[0].bias = model[1].bias  # a shared one counts once
    assert bytes_of_run(model.float()) == (numbers - 3) * 9 + counter * 17
