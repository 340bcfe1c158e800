"""Samples: every form in which users have their data becomes one table."""

from __future__ import annotations

import warnings
from collections import UserDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from snows import ArgumentError, InputError, SnowsWarning
from snows.data.samples import Samples, check_seed, read_samples

X = torch.arange(24.0).view(6, 4)
Y = torch.arange(6)


class One(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Two(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0, *, mask: Tensor | None = None) -> Tensor:
        return x * scale if mask is None else x * mask


class Anything(nn.Module):
    def forward(self, **inputs: Tensor) -> Tensor:
        return inputs["x"]


class WithLabels(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


class Batches:
    """Re-iterable, and neither a sequence nor a dataset."""

    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


FORMS: dict[str, Any] = {
    "a tensor": X,
    "a dataset": TensorDataset(X, Y),
    "a dataset of inputs alone": TensorDataset(X),
    "a loader": DataLoader(TensorDataset(X, Y), batch_size=4),
    "a list of tensors": [X[:4], X[4:]],
    "a re-iterable": Batches((X[:1], Y[:1]), (X[1:], Y[1:])),
    "a dict": {"x": X},
    "dicts with labels": [{"x": X[:3], "labels": Y[:3]}, {"x": X[3:], "labels": Y[3:]}],
    "a mapping": UserDict(x=X),
    "tuples of tuples": [((X[:2],), Y[:2]), ((X[2:],), Y[2:])],
    "tuples of dicts": [({"x": X}, Y)],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_the_same_table(form: str) -> None:
    samples = read_samples(FORMS[form], One())
    assert samples.count == 6
    args, kwargs = samples.call_arguments(1, 3)
    assert torch.equal((*args, *kwargs.values())[0], X[1:3])
    assert len(args) + len(kwargs) == 1
    assert samples.labels is None


@pytest.mark.parametrize("form", ["a dataset", "a loader", "a re-iterable", "dicts with labels", "tuples of dicts"])
def test_labels_are_read_if_asked_for(form: str) -> None:
    samples = read_samples(FORMS[form], One(), with_labels=True)
    assert samples.labels is not None
    assert samples.labels.dtype == torch.int64
    assert torch.equal(samples.labels, Y)


def test_an_argument_that_the_model_requires_is_an_input_whatever_its_name() -> None:
    args, kwargs = read_samples({"x": X, "y": Y}, WithLabels()).call_arguments(0, 2)
    assert args == ()
    assert set(kwargs) == {"x", "y"}
    assert set(read_samples({"x": X, "y": Y}, One()).call_arguments(0, 2)[1]) == {"x"}
    assert set(read_samples({"x": X, "z": Y}, Anything()).call_arguments(0, 2)[1]) == {"x", "z"}


def test_values_that_all_samples_share_stay_whole() -> None:
    shared = torch.tensor(2.0)
    samples = read_samples([{"x": X[:4], "scale": shared}, {"x": X[4:], "scale": shared}], Two())
    assert samples.count == 6
    for part in (samples, samples.shuffled(0), samples.split(2)[1]):
        kwargs = part.call_arguments(0, 1)[1]
        assert torch.equal(kwargs["scale"], shared)
        assert len(kwargs["x"]) == 1


def test_a_single_batch_is_not_copied() -> None:
    assert read_samples([X], One()).leaves[0].data_ptr() == X.data_ptr()


# The table


def table(count: int = 6) -> Samples:
    return read_samples([({"x": X[:count], "scale": 2.0}, Y[:count])], Two(), with_labels=True)


@given(st.integers(0, 6))
def test_a_split_is_all_samples_in_their_order(count: int) -> None:
    first, rest = table().split(count)
    assert (first.count, rest.count) == (count, 6 - count)
    for part, wanted, labels in ((first, X[:count], Y[:count]), (rest, X[count:], Y[count:])):
        assert part.labels is not None
        assert torch.equal(part.labels, labels)
        assert torch.equal(part.call_arguments(0, part.count)[1]["x"], wanted)
        assert part.call_arguments(0, 1)[1]["scale"] == 2.0


@given(st.integers(-(2**63), 2**63))
def test_shuffling_keeps_labels_with_their_samples(seed: int) -> None:
    shuffled, again = table().shuffled(seed), table().shuffled(seed)
    x = shuffled.call_arguments(0, 6)[1]["x"]
    assert shuffled.labels is not None
    assert torch.equal(x, X[shuffled.labels])
    assert torch.equal(shuffled.labels.sort().values, Y)
    assert torch.equal(x, again.call_arguments(0, 6)[1]["x"])


def test_rows_come_in_the_wanted_type_and_layout() -> None:
    images, tokens = torch.rand(4, 3, 5, 5), torch.arange(8).view(4, 2)
    samples = read_samples({"x": images, "mask": tokens}, Two())
    wanted = samples.to(torch.device("cpu"), torch.float64)
    x, mask = (wanted.call_arguments(1, 3)[1][name] for name in ("x", "mask"))
    assert x.dtype == torch.float64
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x, images[1:3].double())
    assert mask.dtype == torch.int64
    assert samples.leaves[0].dtype == wanted.leaves[0].dtype == torch.float32  # they have not moved yet
    moved = wanted.moved()
    assert moved.leaves[0].dtype == torch.float64
    assert moved.rows(0, 4)[0].data_ptr() == moved.leaves[0].data_ptr()
    assert (samples.bytes, moved.bytes) == (4 * 75 * 4 + 64, 4 * 75 * 8 + 64)


# Wrong input

REFUSED: dict[str, tuple[Any, str]] = {
    "a generator": ((x for x in [X]), "is a one-shot generator; give something that can be read again"),
    "a number": (3, "the calibration data is an int; expected a tensor, a Dataset, a DataLoader or a re-iterable"),
    "a word": ("images", "the calibration data is a str"),
    "nothing": ([], "the calibration data has no batches"),
    "no samples": (X[:0], "the calibration data has no batches"),
    "an empty batch": ([()], "a calibration batch is a tuple; expected a tensor, a tuple with the input"),
    "a batch of words": (["x"], "a calibration batch is a str"),
    "a scalar": (torch.tensor(1.0), "a calibration batch of type Tensor has no tensor with a batch dimension"),
    "two sizes": ({"x": X, "mask": X[:3]}, r"the inputs of a calibration batch of type dict have \[3, 6\] samples"),
    "other keys": ([{"x": X}, {"x": X, "mask": X}], "calibration batches differ in their structure"),
    "a number in place of a tensor": (
        [{"x": X, "mask": X}, {"x": X, "mask": 1.0}], "calibration batches differ in their structure",
    ),
    "other shapes": ([X, X[:, :2]], r"differ in the shape of their samples: \[\(2,\), \(4,\)\]; resize or pad"),
    "an unknown key": ({"x": X, "pixels": X}, r"has the keys pixels, which the model's forward does not take \("),
    "NaN": (torch.full((2, 4), torch.nan), "contains NaN or infinity"),
    "infinity": ([X, X - torch.inf], "contains NaN or infinity"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_calibrate_is_refused(case: str) -> None:
    data, words = REFUSED[case]
    with pytest.raises(InputError, match=words):
        read_samples(data, Two())


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (X, "a calibration batch of 6 samples has none"),
        ((X,), "has none"),
        ((X, Y[:5]), r"has torch\.int64 of shape \(5,\)"),
        ((X, Y.float()), r"has torch\.float32 of shape \(6,\)"),
        ({"x": X}, "has none; expected batches"),
    ],
)
def test_labels_that_are_no_labels_are_refused(batch: Any, words: str) -> None:
    with pytest.raises(InputError, match=rf"^labels are needed, but .*{words}"):
        read_samples([batch], One(), with_labels=True)


@pytest.mark.parametrize("seed", [0, -1, 2**64 - 1, -(2**63)])
def test_seeds(seed: int) -> None:
    check_seed(seed)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 0.5, "0", None])
def test_seeds_that_torch_does_not_take(seed: object) -> None:
    with pytest.raises(ArgumentError, match="expected a whole number of at most 64 bits"):
        check_seed(seed)


@pytest.mark.parametrize(
    ("low", "high", "told"), [(0.0, 255.0, True), (0.0, 1.0, False), (-2.0, 255.0, False), (0.0, 16.0, False)]
)
def test_pixels_that_nobody_normalized(low: float, high: float, told: bool) -> None:
    images = torch.linspace(low, high, 2 * 3 * 4 * 4).view(2, 3, 4, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read_samples(images, One())
        read_samples(images.flatten(1), One())  # no images
    words = [str(warning.message) for warning in caught if warning.category is SnowsWarning]
    assert words == ["the calibration images look unnormalized (from 0 to 255); use the same preprocessing as in "
                     "training"] * told  # fmt: skip
