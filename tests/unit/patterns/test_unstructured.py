"""Unstructured sparsity: exact counts, ties, bounds, rankings of several layers, and the steps on the way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from snows.errors import ArgumentError
from snows.patterns import SPREADS, Budget, Unstructured, keep_best, ranks_within, without_lowest


def test_the_facts_of_a_pattern() -> None:
    pattern = Unstructured(0.75, "erk")
    assert pattern.is_unstructured
    assert pattern.group is None
    assert pattern.budget is pattern
    assert not pattern.ranked_together
    assert Unstructured(0.75, "global").ranked_together
    assert pattern.refusal(torch.Size((8, 1, 3, 3))) is None
    assert repr(pattern) == "Unstructured(sparsity=0.75, spread='erk', of='weights', least=0.0, most=None, curves=None)"
    assert pattern.violations(torch.ones(4, 4, dtype=torch.bool)) == 0
    assert pattern != Budget(0.75, "erk")


def test_another_budget_is_taken_whole() -> None:
    budget = Budget(0.5, "measured", "flops", 0.25, 0.875)
    assert Unstructured(0.75).with_budget(budget) == Unstructured(0.5, "measured", "flops", 0.25, 0.875)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1.0,), r"^Unstructured\(1\.0\): the sparsity is the fraction removed, between 0 and 1$"),
        ((-0.1,), "between 0 and 1"),
        ((math.nan,), "between 0 and 1"),
        ((0.5, "even"), "Unstructured: spread is 'even'; expected 'uniform', 'global', 'erk', .* or None"),
        ((0.5, None, "bytes"), "of is 'bytes'; expected 'weights' or 'flops'"),
        ((0.5, "erk", "flops"), "a share of the flops cannot be spread 'erk'; expected 'measured' or 'uniform'"),
        ((0.5, "global", "flops"), "cannot be spread 'global'"),
        ((0.5, None, "weights", 0.6), "least is 0.6 and most None; expected 0 <= least <= sparsity <= most <= 1"),
        ((0.5, None, "weights", -0.1), "least is -0.1"),
        ((0.5, None, "weights", 0.0, 0.4), "most 0.4"),
        ((0.5, None, "weights", 0.0, 1.1), "most 1.1"),
    ],
)
def test_values_out_of_range_are_refused(arguments: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Unstructured(*arguments)


def test_values_at_the_ends_are_fine() -> None:
    Unstructured(0.0)
    Unstructured(0.5, None, "weights", 0.5, 0.5)
    Unstructured(0.5, most=1.0)
    for spread in (None, "measured", "uniform"):
        Unstructured(0.5, spread, "flops")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.7", Unstructured(0.7)),
        (".5", Unstructured(0.5)),
        ("1e-05", Unstructured(1e-5)),
        ("0.7 erk", Unstructured(0.7, "erk")),
        ("0.5 measured flops min=0.1 max=1", Unstructured(0.5, "measured", "flops", 0.1, 1.0)),
        ("0.5 max=.9 global", Unstructured(0.5, "global", most=0.9)),
        ("0.5 min=1e-05", Unstructured(0.5, least=1e-5)),
    ],
)
def test_text(text: str, expected: Unstructured) -> None:
    assert Unstructured.parse(text) == expected
    assert Unstructured.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text", ["", "half", "2:4", "0", "1", "1.5", "-0.5", "nan", "0.5 even", "0.5 max=high", "0.5 1"]
)
def test_other_text(text: str) -> None:
    assert Unstructured.parse(text) is None


def test_of_equal_scores_the_first_are_removed() -> None:
    assert Unstructured(0.5).best_mask(torch.ones(2, 2)).tolist() == [[False, False], [True, True]]
    assert without_lowest(torch.tensor([1.0, 0.0, 1.0, 2.0]), 2).tolist() == [False, False, True, True]
    assert without_lowest(torch.ones(3), 0).all()
    assert not without_lowest(torch.ones(3), 3).any()
    both = keep_best({"a": torch.ones(2, 1), "b": torch.ones(3)}, 0.6)
    assert [both["a"].tolist(), both["b"].tolist()] == [[[False], [False]], [False, True, True]]


@pytest.mark.parametrize(("sparsity", "removed"), [(0.0, 0), (0.24, 1), (0.26, 1), (0.4, 2), (0.87, 3), (0.88, 4)])
def test_counts_are_rounded(sparsity: float, removed: int) -> None:
    assert int((~Unstructured(sparsity).best_mask(torch.rand(2, 2))).sum()) == removed


def test_row_by_row_the_first_rows_lose_what_is_left_over() -> None:
    score = torch.tensor([[5.0, 6.0, 7.0], [1.0, 2.0, 3.0], [9.0, 9.0, 9.0]])
    mask = Unstructured(4 / 9).best_mask_by_row(score)  # four of nine weights: two of the first row
    assert mask.tolist() == [[False, False, True], [False, True, True], [False, True, True]]
    assert Unstructured(3 / 9).best_mask_by_row(score.view(3, 3, 1, 1)).shape == (3, 3, 1, 1)
    assert Unstructured(0.0).best_mask_by_row(score).all()


def test_only_a_global_spread_ranks_layers_together() -> None:
    scores = {"small": torch.arange(4.0), "large": torch.arange(4.0) + 100}
    apart = Unstructured(0.5, "uniform").best_masks(scores)
    assert [int(mask.sum()) for mask in apart.values()] == [2, 2]
    together = Unstructured(0.5, "global", most=1.0).best_masks(scores)
    assert [int(mask.sum()) for mask in together.values()] == [0, 4]
    bounded = Unstructured(0.5, "global").best_masks(scores)  # at most 7/8 of a layer
    assert [int(mask.sum()) for mask in bounded.values()] == [1, 3]
    assert not bounded["small"][:3].any()
    assert not bounded["large"][0]


@pytest.mark.parametrize(
    ("pattern", "size", "expected"),
    [
        (Unstructured(0.9), 1000, (0, 975)),
        (Unstructured(0.5), 8, (0, 7)),
        (Unstructured(0.5), 7, (0, 6)),  # 6.125
        (Unstructured(0.7, most=0.7), 10, (0, 7)),  # not 6, although 0.7 * 10 is below 7 by rounding
        (Unstructured(0.7, least=0.7), 10, (7, 8 + 1)),
        (Unstructured(0.5, least=0.25, most=0.75), 10, (3, 7)),
        (Unstructured(0.5, most=1.0), 10, (0, 10)),
    ],
)
def test_bounds_of_a_layer(pattern: Unstructured, size: int, expected: tuple[int, int]) -> None:
    assert pattern.bounds(size) == expected


def test_ranks_within_bounds() -> None:
    score = torch.tensor([3.0, 1.0, 2.0, 0.0])
    assert ranks_within(score, 1, 3).tolist() == [1, 0, 0, -1]
    assert ranks_within(score, 0, 4).tolist() == [0, 0, 0, 0]
    assert ranks_within(score, 2, 2).tolist() == [1, -1, 1, -1]


def test_bounds_count_only_among_several_layers() -> None:
    score = {"a": torch.arange(4.0)}
    assert int(keep_best(score, 0.75, {"a": (0, 1)})["a"].sum()) == 1
    scores = score | {"b": torch.arange(4.0) + 10}
    masks = keep_best(scores, 0.5, {"a": (0, 1), "b": (0, 4)})
    assert [int(mask.sum()) for mask in masks.values()] == [3, 1]
    masks = keep_best(scores, 0.5, {"a": (0, 4), "b": (2, 4)})
    assert [int(mask.sum()) for mask in masks.values()] == [2, 2]
    masks = keep_best(scores, 0.75, {"a": (0, 1), "b": (0, 1)})  # too narrow: the total comes first
    assert sum(int(mask.sum()) for mask in masks.values()) == 2


def test_complaints_count_each_layer_or_all_together() -> None:
    half, none = torch.tensor([True, False]), torch.tensor([True, True])
    assert Unstructured(0.5).complaint({"a": half, "b": half}) is None
    assert Unstructured(0.5).complaint({"a": half, "b": none}) == "it removes 0 of b; expected 1 (True means kept)"
    together = Unstructured(0.25, "global")
    assert together.complaint({"a": half, "b": none}) is None
    assert together.complaint({"a": half, "b": half}) == "it removes 2 of a, b; expected 1 (True means kept)"
    assert Unstructured(0.25, "global", least=0.25).complaint({"a": half, "b": none}) == (
        "it removes 0 of b; expected 1 to 1"
    )
    assert Unstructured(0.25, "global", most=0.25).complaint({"b": none, "a": half}) == (
        "it removes 1 of a; expected 0 to 0"
    )
    assert Unstructured(0.5, "global", most=0.5).complaint({"a": torch.tensor([True, False, False])}) is None  # alone


@pytest.mark.parametrize("of", ["weights", "flops"])
def test_on_the_way_everything_but_the_shares_stays(of: Any) -> None:
    pattern = Unstructured(0.75, "measured", of, least=0.5, most=0.875)
    halfway = pattern.on_the_way(0.5)
    assert halfway == Unstructured(0.5, "measured", of, least=1 - math.sqrt(0.5), most=0.875)
    assert pattern.on_the_way(1) is pattern
    assert SPREADS[-1] == "measured"
