"""FALCON: two budgets at once, against all sets of weights and against the dual."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from snows.errors import ArgumentError
from snows.masks.chita import CHITA
from snows.masks.falcon import FALCON, two_budgets
from snows.patterns import Unstructured
from tests.masks import TWO_LAYERS, FakeNetwork


def best_under_both(value: list[float], cost: list[float], count: int, work: float) -> float:
    """The largest sum of values over all sets of so many whose work fits; -inf if none does."""
    sets = [chosen for chosen in combinations(range(len(value)), count) if sum(cost[p] for p in chosen) <= work + 1e-9]
    return max((sum(value[p] for p in chosen) for chosen in sets), default=-math.inf)


@pytest.mark.parametrize("seed", range(10))
def test_two_budgets_come_within_one_weight_of_the_best(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    value = torch.rand(10, generator=generator, dtype=torch.float64)
    cost = torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64)[torch.randint(0, 3, (10,), generator=generator)]
    for count in (2, 5, 8, 10):
        for share in (0.1, 0.15, 0.25, 0.4, 0.55, 0.7, 1.0):
            work = share * float(cost.sum())
            kept = two_budgets(value, cost, count, work)
            assert kept.dtype == torch.bool
            assert float(cost[kept].sum()) <= work + 1e-9
            best = best_under_both(value.tolist(), cost.tolist(), count, work)
            if best == -math.inf:  # even the cheapest are too many: as many of them as fit
                assert int(kept.sum()) == int((cost.sort().values.cumsum(0) <= work).sum())
                continue
            assert int(kept.sum()) == count  # exactly, where that can be
            assert best - float(value.max()) <= float(value[kept].sum()) <= best + 1e-9
            if share == 1.0:
                assert float(value[kept].sum()) == pytest.approx(best)


def test_two_budgets_lose_a_weight_at_most_however_many_there_are() -> None:
    """Against the dual, which is above every choice at any prices."""
    generator = torch.Generator().manual_seed(0)
    value = torch.rand(3000, generator=generator, dtype=torch.float64).square()
    cost = torch.tensor([1.0, 16.0, 64.0], dtype=torch.float64)[torch.arange(3000) // 1000]
    for count, share in ((900, 0.2), (2500, 0.62), (300, 0.05), (1500, 0.2)):
        work = share * float(cost.sum())
        kept = two_budgets(value, cost, count, work)
        assert int(kept.sum()) == count
        assert float(cost[kept].sum()) <= work
        bound = math.inf
        for price in torch.linspace(0, 0.04, 1000, dtype=torch.float64):
            reduced = value - price * cost
            weight_price = reduced.sort(descending=True).values[count]
            over = (reduced - weight_price).clamp(min=0).sum()
            bound = min(bound, float(count * weight_price + work * price + over))
        assert bound * 0.999 - 1 <= float(value[kept].sum()) <= bound + 1e-9


def test_two_budgets_take_what_is_worth_nothing_if_nothing_else_fits() -> None:
    """At a price far above the value of any weight for its work."""
    value, cost = torch.tensor([1.0, 0.0, 0.9], dtype=torch.float64), torch.tensor([10.0, 9.0, 10.0]).double()
    assert two_budgets(value, cost, 1, 9.0).tolist() == [False, True, False]
    assert two_budgets(value, cost, 2, 19.0).tolist() == [True, True, False]
    value, cost = torch.tensor([1.0, 0.0, 0.9], dtype=torch.float64), torch.tensor([10.0, 9.0, 1.0]).double()
    assert two_budgets(value, cost, 2, 10.0).tolist() == [False, True, True]  # the smallest step of cost decides


def test_falcon_without_flops_has_chitas_support() -> None:
    for solver in (CHITA(), CHITA(steps=10, block=None)):
        network = FakeNetwork(TWO_LAYERS, Unstructured(0.5, "global"), uses={"a": 1, "b": 9})
        one, two = FALCON(solver=solver).choose(network), solver.choose(network)
        for name in TWO_LAYERS:
            assert torch.equal(one.masks[name], two.masks[name])
            torch.testing.assert_close(one.weights[name], two.weights[name])


@pytest.mark.parametrize("solver", [CHITA(), CHITA(steps=40, block=None)], ids=["support alone", "searched"])
@pytest.mark.parametrize("seed", range(3))
def test_falcon_keeps_to_both_budgets(seed: int, solver: CHITA) -> None:
    shapes = {"a": (8, 6), "b": (10, 9), "c": (4, 10)}
    uses = {"a": 16, "b": 4, "c": 1}
    network = FakeNetwork(shapes, Unstructured(0.5, "global"), seed=seed, uses=uses)
    network.rows["a"] *= 10  # a search would rather have weights of the costly layer back
    choice = FALCON(flops=0.7, solver=solver).choose(network)
    total = sum(uses[name] * weight.numel() for name, weight in network.weights.items())
    work = sum(uses[name] * int(mask.sum()) for name, mask in choice.masks.items())
    assert work <= 0.3 * total
    assert sum(int(mask.sum()) for mask in choice.masks.values()) == 89
    plain = FALCON(solver=solver).choose(network)
    assert sum(uses[name] * int(mask.sum()) for name, mask in plain.masks.items()) > work


@pytest.mark.parametrize("flops", [0.0, 1.0, -0.5, 3.0])
def test_falcon_refuses_shares_that_are_none(flops: float) -> None:
    with pytest.raises(ArgumentError, match="expected the share removed, between 0 and 1"):
        FALCON(flops=flops)


def test_falcon_with_flops_wants_one_sparsity_for_all() -> None:
    for pattern in (Unstructured(0.5, "uniform"), Unstructured(0.5)):
        with pytest.raises(ArgumentError, match=r"takes one sparsity for all layers, such as 0\.7"):
            FALCON(flops=0.5).choose(FakeNetwork(TWO_LAYERS, pattern))
    mixed = {"a": Unstructured(0.5, "global"), "b": Unstructured(0.6, "global")}
    with pytest.raises(ArgumentError, match="takes one sparsity for all layers"):
        FALCON(flops=0.5).choose(FakeNetwork(TWO_LAYERS, mixed))


def test_falcon_with_flops_cuts_no_layer_off() -> None:
    """A costly layer of small weights would go but for one; unless told, it keeps a quarter of the average density."""
    shapes = {"a": (20, 20), "b": (20, 20)}
    network = FakeNetwork(shapes, Unstructured(0.5, "global"), uses={"a": 50, "b": 1})
    network.weights["a"] *= 1e-3
    assert two_budgets_alone(network, 400, 0.6) <= 1
    masks = FALCON(flops=0.6, solver=CHITA(steps=5, block=None)).choose(network).masks
    assert int(masks["a"].sum()) == 400 * 0.4 / 4
    assert sum(int(mask.sum()) for mask in masks.values()) == 400


@pytest.mark.parametrize("least", [0.0, 0.4])
def test_falcon_with_flops_keeps_to_bounds(least: float) -> None:
    network = FakeNetwork({"a": (20, 20), "b": (20, 20)}, Unstructured(0.5, "global", least=least, most=0.7))
    network.weights["a"] *= 1e-3
    masks = FALCON(flops=0.3, solver=CHITA(steps=5, block=None)).choose(network).masks
    assert int(masks["a"].sum()) == max(400 * 0.3, 400 - 400 * (1 - least))
    assert int(masks["b"].sum()) == 400 - int(masks["a"].sum())


def test_falcon_says_when_bounds_and_flops_exclude_each_other() -> None:
    network = FakeNetwork(TWO_LAYERS, Unstructured(0.5, "global", most=0.6), uses={"a": 50, "b": 1})
    with pytest.raises(ArgumentError, match=r"90% fewer multiplications .* no layer loses more than 60% \(max=0.6\)"):
        FALCON(flops=0.9).choose(network)


def two_budgets_alone(network: FakeNetwork, count: int, flops: float) -> int:
    """How many weights of the first layer stay without bounds."""
    value = torch.cat([w.double().square().flatten() for w in network.weights.values()])
    cost = torch.cat([torch.full((w.numel(),), float(network.uses[n])) for n, w in network.weights.items()]).double()
    kept = two_budgets(value, cost, count, (1 - flops) * float(cost.sum()))
    return int(kept[: next(iter(network.weights.values())).numel()].sum())
