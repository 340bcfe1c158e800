"""N:M: what is refused, which masks are best and which break it, and the steps on the way to it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from snows.errors import ArgumentError
from snows.patterns import NM, Group


def test_the_facts_of_a_pattern() -> None:
    pattern = NM(1, 4)
    assert pattern.sparsity == 0.75
    assert pattern.group == Group(size=4, kept=1)
    assert pattern.group.removed == 3
    assert not pattern.is_unstructured
    assert pattern.budget is None
    assert not pattern.ranked_together
    assert pattern.bounds(12) == (9, 9)
    assert str(pattern) == "1:4"
    assert repr(pattern) == "NM(n=1, m=4)"
    assert hash(pattern) == hash(NM(1, 4))
    assert dataclasses.replace(pattern, n=2) == NM(2, 4) != pattern
    assert dataclasses.replace(pattern, n=2).sparsity == 0.5


@pytest.mark.parametrize(("n", "m"), [(4, 4), (5, 4), (0, 4), (-1, 4), (2.0, 4), (2, 4.0), ("2", 4)])
def test_only_whole_numbers_with_0_below_n_below_m(n: int, m: int) -> None:
    with pytest.raises(ArgumentError, match=r"^NM\(.*0 < N < M is needed$"):
        NM(n, m)


def test_text() -> None:
    assert NM.parse("2:4") == NM.parse(" 2 :  4 ") == NM(2, 4)
    assert NM.parse("15:16") == NM(15, 16)
    for text in ("0.5", "2:4:8", "2:", ":4", "-1:4", "2.0:4", "2:4 uniform", "", "1:" + "9" * 10):
        assert NM.parse(text) is None
    for text in ("4:2", "2:2", "0:4"):
        with pytest.raises(ArgumentError, match=f"pattern '{text}': N:M keeps N of every M weights, so 0 < N < M"):
            NM.parse(text)


def test_input_channels_per_group_must_be_a_multiple_of_m() -> None:
    assert NM(2, 4).refusal(torch.Size((3, 8, 5, 5))) is None
    assert NM(2, 4).refusal(torch.Size((8, 6))) == "its 6 input channels per group are no multiple of 4"
    assert NM(2, 4).refusal(torch.Size((8, 1, 4, 4))) == "its 1 input channels per group are no multiple of 4"


def test_groups_run_along_input_channels_at_one_kernel_position() -> None:
    score = torch.tensor([[[9.0, 1.0], [8.0, 2.0], [1.0, 3.0], [2.0, 4.0]]])  # one output, four inputs, kernel of 2
    assert NM(2, 4).best_mask(score).tolist() == [[[True, False], [True, False], [False, True], [False, True]]]
    assert NM(1, 2).best_mask(score).tolist() == [[[True, False], [False, True], [False, False], [True, True]]]


def test_equal_scores_are_told_apart_by_position() -> None:
    assert NM(2, 4).best_mask(torch.ones(1, 8)).tolist() == [[True, True, False, False] * 2]
    mixed = torch.tensor([[1.0, 2.0, 1.0, 1.0]])
    assert NM(2, 4).best_mask(mixed).tolist() == [[True, True, False, False]]


def test_rows_and_layers_are_chosen_by_themselves() -> None:
    score = torch.rand(3, 8)
    pattern = NM(1, 4)
    assert torch.equal(pattern.best_mask_by_row(score), pattern.best_mask(score))
    masks = pattern.best_masks({"a": score, "b": 100 * score})
    assert list(masks) == ["a", "b"]
    assert torch.equal(masks["a"], pattern.best_mask(score))
    assert torch.equal(masks["b"], masks["a"])


def test_violations_are_groups_that_keep_too_many() -> None:
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    assert NM(2, 4).violations(mask) == 1
    assert NM(1, 2).violations(mask) == 1
    assert NM(3, 4).violations(mask) == 0
    across = torch.ones(2, 4, 3, dtype=torch.bool)
    assert NM(2, 4).violations(across) == 6
    assert NM(1, 2).violations(across) == 12


def test_groups_that_keep_too_few_are_complained_of_too() -> None:
    mask = torch.tensor([[True, True, False, False, True, False, False, False]])
    assert NM(2, 4).violations(mask) == 0
    words = "1 of 2 groups of a do not keep 2 of 4 input channels (True means kept)"
    assert NM(2, 4).complaint({"a": mask}) == words
    exact = torch.tensor([[True, True, False, False]])
    assert NM(2, 4).complaint({"b": exact, "a": mask}) == words
    assert NM(2, 4).complaint({"b": exact}) is None
    assert NM(2, 4).complaint({"b": ~exact, "c": exact}) is None
    assert NM(1, 4).complaint({"c": ~exact}) == "1 of 1 groups of c do not keep 1 of 4 input channels (True means kept)"


@pytest.mark.parametrize(
    ("pattern", "steps", "expected"),
    [
        (NM(1, 4), 3, ["2:4", "1:4", "1:4"]),
        (NM(1, 4), 2, ["2:4", "1:4"]),
        (NM(2, 4), 2, ["2:4", "2:4"]),
        (NM(1, 16), 4, ["8:16", "4:16", "2:16", "1:16"]),
        (NM(3, 4), 3, ["3:4", "3:4", "3:4"]),  # never dense
        (NM(2, 4), 1, ["2:4"]),
    ],
)
def test_each_step_keeps_the_same_share_rounded_down(pattern: NM, steps: int, expected: list[str]) -> None:
    assert [str(pattern.on_the_way(step / steps)) for step in range(1, steps + 1)] == expected
