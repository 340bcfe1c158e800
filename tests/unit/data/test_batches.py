"""Calls of a model from every form in which users have their data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from snows import InputError
from snows.data.batches import calls, labels_of

from .test_samples import FORMS, REFUSED, One, Two, X, Y


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [1, 4, 100])
def test_every_form_gives_the_same_samples(form: str, batch: int) -> None:
    found = list(calls(FORMS[form], One(), batch=batch))
    inputs = [(*call.args, *call.kwargs.values()) for call in found]
    assert torch.equal(torch.cat([x for (x,) in inputs]), X)
    assert [len(x) for (x,) in inputs] == [call.count for call in found]
    assert max(call.count for call in found) <= max(batch, 1)


@pytest.mark.parametrize("form", FORMS)
def test_given_labels_go_with_their_samples(form: str) -> None:
    found = list(calls(FORMS[form], One(), labels=10 * Y, batch=2))
    assert torch.equal(torch.cat([call.labels for call in found]), 10 * Y)
    assert all(len(call.labels) == call.count for call in found)


def test_labels_within_batches() -> None:
    with_labels = [form for form in FORMS if next(calls(FORMS[form], One())).labels is not None]
    assert with_labels == [
        "a dataset", "a loader", "a re-iterable", "dicts with labels", "tuples of tuples", "tuples of dicts",
    ]  # fmt: skip
    for form in with_labels:
        assert torch.equal(torch.cat([call.labels for call in calls(FORMS[form], One(), batch=4)]), Y)
    assert labels_of(([X, X],)) is None  # two inputs


def test_values_that_all_samples_share_stay_whole() -> None:
    found = list(calls([({"x": X, "scale": torch.tensor(2.0)}, Y)], Two(), batch=4))
    assert [call.kwargs["scale"].shape for call in found] == [(), ()]


@pytest.mark.parametrize("case", [name for name in REFUSED if name in ("a generator", "a number", "a word")])
def test_what_cannot_be_read_is_refused(case: str) -> None:
    data, words = REFUSED[case]
    with pytest.raises(InputError, match=words.replace("calibration", "evaluation")):
        list(calls(data, Two()))


@pytest.mark.parametrize(
    ("data", "labels", "words"),
    [
        ([], None, "there are no samples to evaluate on"),
        (X[:0], None, "there are no samples to evaluate on"),
        (X, Y[:3], "there are 6 samples or more and 3 labels"),
        (X[:3], Y, "there are 3 samples and 6 labels"),
        (DataLoader(TensorDataset(X), 4), Y[:5], "there are 6 samples or more and 5 labels"),
        ([()], None, "an evaluation batch is a tuple; expected a tensor"),
        ({"x": X, "pixels": X}, None, "an evaluation batch has the keys pixels, which the model's forward"),
        (torch.tensor(1.0), None, "an evaluation batch has no tensor with a batch dimension"),
        ({"x": X, "mask": X[:3]}, None, r"the inputs of an evaluation batch have \[3, 6\] samples"),
    ],
)
def test_samples_and_labels_that_do_not_fit(data: Any, labels: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        list(calls(data, Two(), labels))


class Several(One):
    def forward(self, image: Tensor, number: Tensor) -> Tensor:  # type: ignore[override]  # another model
        return image + number


@pytest.mark.parametrize("batch", [X, (X, Y), [X, Y]])
def test_a_single_input_is_refused_where_the_model_needs_several(batch: Any) -> None:
    with pytest.raises(InputError) as refused:
        list(calls([batch], Several()))
    assert str(refused.value) == (
        "the model needs 2 inputs (image, number), but an evaluation batch gives one: the first item of a tuple is the "
        "input, and the others are labels; give each batch as a dict {'image': …, 'number': …}"
    )


@pytest.mark.parametrize("batch", [{"image": X, "number": X}, ((X, X), Y)])
def test_several_inputs_in_one_batch(batch: Any) -> None:
    (call,) = calls([batch], Several())
    assert len(call.args) + len(call.kwargs) == 2
