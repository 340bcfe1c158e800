"""Exchanges against every exchange tried, each with a fit of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import snows
from snows.devices.working_memory import working_within
from snows.errors import ArgumentError, InputError
from snows.masks import as_method, exchange
from snows.masks.alps import ALPS
from snows.masks.exchange import Exchange
from snows.masks.obc import OBC
from snows.patterns import NM, Pattern, Unstructured
from tests.masks import best_fit, damped_per_row, each_layer, fit_all, groups_of, layer, squared_error


def error_of(row: np.ndarray, hessian: np.ndarray, kept: np.ndarray) -> float:
    change = row - best_fit(row, hessian, kept)
    return float(change @ hessian @ change)


def swapped(kept: np.ndarray, out: int, into: int) -> np.ndarray:
    kept = kept.copy()
    kept[out], kept[into] = False, True
    return kept


def best_exchanges(row: np.ndarray, hessian: np.ndarray, kept: np.ndarray, group: list[int] | None) -> np.ndarray:
    """By definition: in groups the best of all pairs, else what brings most for what then costs least."""
    while True:
        now = error_of(row, hessian, kept)
        inside, outside = kept.nonzero()[0], (~kept).nonzero()[0]
        if not len(outside) or not len(inside):
            return kept
        if group is not None:
            pairs = [(i, j) for i in inside for j in outside if group[i] == group[j]]
        else:
            j = min(outside, key=lambda j: error_of(row, hessian, kept | (np.arange(len(row)) == j)))
            pairs = [(i, j) for i in inside]
        error, best = min(((error_of(row, hessian, swapped(kept, *pair)), pair) for pair in pairs), key=lambda x: x[0])
        if error >= now * (1 - 1e-9):
            return kept
        kept = swapped(kept, *best)


@each_layer
def test_exchanges_are_those_of_the_definition(name: str, pattern: Pattern) -> None:
    changed = 0
    for seed in range(3):
        weight, gram = layer(name, seed)
        hessians = damped_per_row(weight, gram, 0.01)
        start = as_method("wanda").choose_layer("w", weight, gram, pattern).masks["w"].flatten(1)  # type: ignore[union-attr]
        group = groups_of(tuple(weight.shape), pattern) if isinstance(pattern, NM) else None
        rows = weight.flatten(1).numpy()
        expected = [best_exchanges(rows[r], hessians[r], kept, group) for r, kept in enumerate(start.numpy())]
        choice = Exchange("wanda", least_gain=1e-9).choose_layer("w", weight, gram, pattern)
        mask = choice.masks["w"]
        assert torch.equal(mask.flatten(1), torch.tensor(np.stack(expected)))
        torch.testing.assert_close(choice.weights["w"], fit_all(weight, hessians, mask), rtol=1e-7, atol=1e-9)
        changed += int((mask.flatten(1) != start).sum())
    assert changed


def wide_problem(group: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of two Gram matrices, wide enough for many exchanges, with the largest weights kept."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 300, 120, generator=generator, dtype=torch.float64)
    x = x @ (torch.eye(120) + 0.3 * torch.randn(120, 120, generator=generator)).double()
    rows = torch.randn(6, 120, generator=generator, dtype=torch.float64)
    pattern = Unstructured(0.7) if group is None else NM(1, group)
    return rows, x.mT @ x / 300, torch.tensor([0, 0, 0, 1, 1, 1]), pattern.best_mask(rows.abs())


@pytest.mark.parametrize("group", [4, None])
def test_beginning_anew_and_row_by_row_change_nothing(group: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, gram, which, kept = wide_problem(group)
    found = exchange.exchange(rows, gram, which, kept, group, 1e-9)
    assert int((found != kept).sum()) > 40
    assert torch.equal(found.sum(1), kept.sum(1))
    for anew in (1, 3):
        monkeypatch.setattr(exchange, "_EXCHANGES_BETWEEN_STARTS", anew)
        assert torch.equal(exchange.exchange(rows, gram, which, kept, group, 1e-9), found)
    with working_within(1):
        assert torch.equal(exchange.exchange(rows, gram, which, kept, group, 1e-9), found)


@pytest.mark.parametrize("pattern", [NM(1, 4), NM(2, 4), Unstructured(0.75)], ids=str)
@pytest.mark.parametrize("start", [OBC(), ALPS()], ids=lambda m: type(m).__name__)
def test_exchanges_better_every_start(start: OBC | ALPS, pattern: Pattern) -> None:
    rows, gram, _, _ = wide_problem(None)
    weight, gram = rows, gram[:1]
    hessians = damped_per_row(weight, gram, 0.01)
    first, bettered = (
        squared_error(weight, method.choose_layer("w", weight, gram, pattern).weights["w"], hessians)
        for method in (start, Exchange(start))
    )
    assert bettered < 0.995 * first


def test_names_and_what_is_no_start() -> None:
    assert as_method("exchange") == Exchange()
    assert as_method("obc+exchange") == Exchange("obc")
    snows.check_mask_method("wanda+exchange")
    with pytest.raises(ArgumentError, match=r"'magnitude', which chooses the masks of all layers .*'obc', 'alps'$"):
        as_method("magnitude+exchange")
    with pytest.raises(ArgumentError, match="mask 'nonsense' is not known"):
        Exchange("nonsense")


def test_singular_moments_ask_for_damping() -> None:
    rows, gram, which, kept = wide_problem(4)
    with pytest.raises(InputError, match="raise the damping of Exchange"):
        exchange.exchange(rows, torch.zeros_like(gram), which, kept, 4)


@pytest.mark.parametrize("group", [4, None])
def test_the_error_is_kept_up_to_date(group: int | None) -> None:
    """Searches end where the gain is a small share of it."""
    rows, gram, which, kept = wide_problem(group)
    tableaus = exchange._Tableaus(rows, gram, which, kept, group or 1)
    improving = torch.ones(len(rows), dtype=torch.bool)
    for _ in range(3):
        improving = tableaus.exchange_one(improving, 1e-9, in_groups=group is not None)
        for r, row in enumerate(rows.numpy()):
            expected = error_of(row, gram[which[r]].numpy(), tableaus.kept[r].numpy())
            assert float(tableaus._error[r]) == pytest.approx(expected, rel=1e-6)
