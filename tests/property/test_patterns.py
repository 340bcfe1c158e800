"""Masks for any shape and any scores: exact counts, and no better mask is allowed."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from snows.masks import best_masks, default_spread
from snows.masks.magnitude import Magnitude
from snows.masks.random import Random
from snows.masks.wanda import Wanda
from snows.patterns import NM, Pattern, Unstructured, keep_best
from snows.patterns.budgets import spread_out
from tests.masks import FakeNetwork
from tests.oracles import best_nm_score, best_unstructured_score

seeds = st.integers(0, 2**31 - 1)
sparsities = st.floats(0.01, 0.99)


@st.composite
def nm_patterns(draw: st.DrawFn) -> NM:
    m = draw(st.integers(2, 6))
    return NM(draw(st.integers(1, m - 1)), m)


@st.composite
def shapes(draw: st.DrawFn, channels: int = 1) -> tuple[int, ...]:
    """Of a linear layer or of a convolution in one to three dimensions."""
    kernel = draw(st.lists(st.integers(1, 3), max_size=3))
    return (draw(st.integers(1, 5)), channels * draw(st.integers(1, 3)), *kernel)


def scores(shape: tuple[int, ...], seed: int, ties: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (score * 3).floor() if ties else score


@given(pattern=nm_patterns(), data=st.data(), seed=seeds, ties=st.booleans())
def test_nm_masks_keep_exactly_n_of_every_m_and_the_best(
    pattern: NM, data: st.DataObject, seed: int, ties: bool
) -> None:
    shape = data.draw(shapes(channels=pattern.m))
    score = scores(shape, seed, ties)
    mask = pattern.best_mask(score)
    assert mask.shape == shape
    assert mask.dtype == torch.bool
    # spelled out: at each output and kernel position, consecutive input channels in groups of M
    for group in range(shape[1] // pattern.m):
        part = mask[:, group * pattern.m : (group + 1) * pattern.m]
        assert (part.sum(1) == pattern.n).all()
    assert pattern.violations(mask) == 0
    assert float(score[mask].sum()) == pytest.approx(best_nm_score(score, pattern.n, pattern.m))
    assert torch.equal(mask, pattern.best_mask(score.clone()))


@given(n=st.integers(1, 15), more=st.integers(1, 15), steps=st.integers(1, 6))
def test_an_nm_pattern_is_reached_in_steps(n: int, more: int, steps: int) -> None:
    pattern = NM(n, n + more)
    way = [pattern.on_the_way(step / steps) for step in range(1, steps + 1)]
    assert way[-1] == pattern
    assert all(a.n >= b.n and a.m == b.m for a, b in pairwise(way))


@given(sparsity=sparsities, steps=st.integers(1, 6))
def test_a_sparsity_is_reached_in_steps_that_keep_the_same_share(sparsity: float, steps: int) -> None:
    pattern = Unstructured(sparsity, least=sparsity / 2, most=sparsity)
    densities = [1.0] + [1 - pattern.on_the_way(step / steps).sparsity for step in range(1, steps + 1)]
    assert pattern.on_the_way(1) == pattern
    for before, after in pairwise(densities):
        assert after / before == pytest.approx((1 - sparsity) ** (1 / steps))


@given(pattern=nm_patterns(), channels=st.integers(1, 20))
def test_nm_refuses_what_it_cannot_cut_into_groups(pattern: NM, channels: int) -> None:
    reason = pattern.refusal(torch.Size((8, channels, 3, 3)))
    assert (reason is None) == (channels % pattern.m == 0)
    if reason:
        assert str(channels) in reason


@given(sparsity=sparsities, shape=shapes(), seed=seeds, ties=st.booleans())
def test_unstructured_counts_are_exact(sparsity: float, shape: tuple[int, ...], seed: int, ties: bool) -> None:
    score = scores(shape, seed, ties)
    mask = Unstructured(sparsity).best_mask(score)
    assert int((~mask).sum()) == round(sparsity * score.numel())
    if mask.any() and not mask.all():
        assert float(score[mask].min()) >= float(score[~mask].max())


@given(sparsity=sparsities, seed=seeds, ties=st.booleans())
def test_unstructured_is_the_best_of_all_masks(sparsity: float, seed: int, ties: bool) -> None:
    score = scores((2, 4), seed, ties)
    mask = Unstructured(sparsity).best_mask(score)
    assert float(score[mask].sum()) == pytest.approx(best_unstructured_score(score, int(mask.sum())))


@given(sparsity=sparsities, sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5), seed=seeds, scale=st.booleans())
def test_a_global_spread_is_exact_and_keeps_the_floor(
    sparsity: float, sizes: list[int], seed: int, scale: bool
) -> None:
    """Scores of different scale by layer: a ranking without a floor would cut the small ones off."""
    table = {
        str(i): scores((1, size), seed + i, ties=False) * (10.0 ** (-3 * i) if scale else 1)
        for i, size in enumerate(sizes)
    }
    pattern = Unstructured(sparsity, "global")
    masks = keep_best(table, sparsity, {name: pattern.bounds(score.numel()) for name, score in table.items()})
    total = sum(sizes)
    removed = sum(int((~mask).sum()) for mask in masks.values())
    assert removed == round(sparsity * total)
    if len(sizes) > 1:
        floors = {name: math.ceil((1 - sparsity) * 0.25 * score.numel()) for name, score in table.items()}
        if sum(floors.values()) <= total - removed:
            assert all(int(masks[name].sum()) >= floor for name, floor in floors.items())
    for name, mask in masks.items():  # within a layer the best are kept
        if mask.any() and not mask.all():
            assert float(table[name][mask].min()) >= float(table[name][~mask].max())


@given(sparsity=sparsities, seed=seeds)
def test_without_a_cap_the_ranking_is_global(sparsity: float, seed: int) -> None:
    table = {"a": scores((3, 4), seed, False), "b": scores((2, 5), seed + 1, False)}
    masks = keep_best(table, sparsity)
    together = Unstructured(sparsity).best_mask(torch.cat([score.flatten() for score in table.values()])[None])
    assert torch.equal(torch.cat([mask.flatten() for mask in masks.values()])[None], together)


@given(sparsity=sparsities, sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4), seed=seeds)
def test_a_uniform_spread_removes_the_same_share_of_each_layer(sparsity: float, sizes: list[int], seed: int) -> None:
    table = {str(i): scores((2, size), seed + i, False) * 10.0**-i for i, size in enumerate(sizes)}
    patterns = dict.fromkeys(table, Unstructured(sparsity, spread="uniform"))
    for mask in best_masks(table, patterns).values():
        assert int((~mask).sum()) == round(sparsity * mask.numel())


def network_of(weights: dict[str, Tensor], patterns: dict[str, Pattern], seed: int = 0) -> FakeNetwork:
    network = FakeNetwork({name: tuple(weight.shape) for name, weight in weights.items()}, patterns, seed=seed)
    network.weights = weights
    return network


def kept_of_each(method: Magnitude | Random, weights: dict[str, Tensor], patterns: dict[str, Pattern]) -> list[int]:
    """How many weights each layer keeps, with patterns spread as in a run."""
    network = network_of(weights, patterns)
    network.patterns = spread_out(patterns, network, default_spread(method), ranks_together=True)
    return [int(mask.sum()) for mask in method.choose(network).masks.values()]


def test_the_pattern_overrules_the_habit_of_the_method() -> None:
    weights = {"small": torch.full((4, 4), 0.01), "large": torch.ones(4, 4)}
    small, large = kept_of_each(Magnitude(), weights, dict.fromkeys(weights, Unstructured(0.5)))
    assert small < large
    assert kept_of_each(Magnitude(), weights, dict.fromkeys(weights, Unstructured(0.5, "uniform"))) == [8, 8]
    assert kept_of_each(Random(), weights, dict.fromkeys(weights, Unstructured(0.5))) == [8, 8]


def test_patterns_are_ranked_among_their_own_layers() -> None:
    weights = {name: torch.rand(4, 4) for name in "abc"}
    patterns: dict[str, Pattern] = {"a": NM(1, 4), "b": Unstructured(0.25), "c": Unstructured(0.75)}
    assert kept_of_each(Magnitude(), weights, patterns) == [4, 12, 4]


@given(sparsity=sparsities, seed=seeds, groups=st.integers(1, 2), rows=st.integers(1, 4), columns=st.integers(1, 6))
def test_wanda_counts_are_exact_and_even_over_rows(
    sparsity: float, seed: int, groups: int, rows: int, columns: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(groups * rows, columns, 1, 2, generator=generator)
    x = torch.randn(groups, 9, columns * 2, generator=generator).double()
    gram = x.transpose(1, 2) @ x
    mask = Wanda().choose_layer("w", weight, gram, Unstructured(sparsity)).masks["w"]
    assert int((~mask).sum()) == round(sparsity * weight.numel())
    per_row = mask.flatten(1).sum(1)
    assert int(per_row.max() - per_row.min()) <= 1
    norms = x.pow(2).sum(1).sqrt().repeat_interleave(rows, 0).view_as(weight)  # of each group's own inputs
    score = weight.abs() * norms
    for row_score, row_mask in zip(score.flatten(1), mask.flatten(1), strict=True):
        if row_mask.any() and not row_mask.all():
            assert float(row_score[row_mask].min()) >= float(row_score[~row_mask].max()) * (1 - 1e-5)
