"""How sparsities are spread over layers: exact in sum, within bounds, and each rule by its definition."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import snows.patterns.budgets
from snows.patterns import NM, SPREADS, Pattern, Unstructured, keep_best
from snows.patterns.budgets import apportion, cheapest_levels, lamp_scores, spread_out

Shapes = Mapping[str, tuple[int, ...]]


class FakeMeasured:
    """Random layers. The error of a layer's pruning is its squared change times what the layer is said to matter."""

    def __init__(
        self,
        shapes: Shapes,
        uses: Mapping[str, int] | None = None,
        matters: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
        }
        self.uses = uses or dict.fromkeys(shapes, 1)
        self.matters = matters or dict.fromkeys(shapes, 1.0)

    def grams(self) -> Iterator[tuple[str, Tensor]]:
        """In an order of its own, as the network has one."""
        for name in reversed(self.weights):
            columns = self.weights[name][0].numel()
            yield name, torch.eye(columns, dtype=torch.float64)[None]

    def trials(self) -> Iterator[Any]:
        for name, gram in self.grams():
            yield FakeTrial(name, gram, self)


@dataclass(frozen=True)
class FakeTrial:
    name: str
    gram: Tensor
    network: FakeMeasured

    def error(self, weight: Tensor) -> float:
        return self.network.matters[self.name] * float((weight - self.network.weights[self.name]).square().sum())


def removed(patterns: Mapping[str, Pattern], network: FakeMeasured) -> dict[str, int]:
    """As masks of each layer by itself come out."""
    return {name: int((~patterns[name].best_mask(w.abs())).sum()) for name, w in network.weights.items()}


def spread(network: FakeMeasured, pattern: Unstructured, default: Any = "uniform") -> dict[str, int]:
    return removed(spread_out(dict.fromkeys(network.weights, pattern), network, default, False), network)


shapes = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3)).map(lambda s: s if s[2] > 1 else s[:2]),
    min_size=1,
    max_size=4,
).map(lambda made: {str(i): shape for i, shape in enumerate(made)})


@settings(max_examples=100)
@given(shapes=shapes, sparsity=st.floats(0.01, 0.99), rule=st.sampled_from(SPREADS), seed=st.integers(0, 99))
def test_every_spread_removes_the_share_to_the_weight(shapes: Shapes, sparsity: float, rule: Any, seed: int) -> None:
    network = FakeMeasured(shapes, seed=seed)
    total = sum(w.numel() for w in network.weights.values())
    assert sum(spread(network, Unstructured(sparsity, rule)).values()) == round(sparsity * total)


@settings(max_examples=100)
@given(
    shapes=shapes,
    sparsity=st.floats(0.05, 0.95),
    room=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    rule=st.sampled_from(SPREADS),
    seed=st.integers(0, 99),
)
def test_bounds_hold_where_whole_numbers_allow_it(
    shapes: Shapes, sparsity: float, room: tuple[float, float], rule: Any, seed: int
) -> None:
    least, most = sparsity * room[0], sparsity + (1 - sparsity) * room[1]
    pattern = Unstructured(sparsity, rule, least=least, most=most)
    network = FakeMeasured(shapes, seed=seed)
    sizes = {name: w.numel() for name, w in network.weights.items()}
    gone = spread(network, pattern)
    wanted = round(sparsity * sum(sizes.values()))
    assert sum(gone.values()) == wanted
    low = {name: math.ceil(least * size - 1e-9) for name, size in sizes.items()}
    high = {name: math.floor(most * size + 1e-9) for name, size in sizes.items()}
    if len(sizes) > 1 and sum(low.values()) <= wanted <= sum(high.values()) and all(low[n] <= high[n] for n in low):
        for name, count in gone.items():
            assert low[name] <= count <= high[name]


@settings(max_examples=60)
@given(data=st.data(), sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_apportion_is_exact_within_bounds_and_near(data: st.DataObject, sizes: list[int]) -> None:
    bounds = [tuple(sorted(data.draw(st.tuples(st.integers(0, s), st.integers(0, s))))) for s in sizes]
    ideal = [data.draw(st.floats(0, s)) for s in sizes]
    total = data.draw(st.integers(sum(low for low, _ in bounds), sum(high for _, high in bounds)))
    counts = apportion(ideal, sizes, bounds, total)  # type: ignore[arg-type]
    assert sum(counts) == total
    assert all(low <= count <= high for count, (low, high) in zip(counts, bounds, strict=True))
    if abs(sum(ideal) - total) < 1e-9 and all(
        low <= value <= high for value, (low, high) in zip(ideal, bounds, strict=True)
    ):
        assert all(abs(count - value) < 1 + 1e-6 for count, value in zip(counts, ideal, strict=True))


def test_apportion_keeps_whole_numbers_that_fit_already() -> None:
    assert apportion([3, 5, 0], [10, 10, 10], [(0, 10)] * 3, 8) == [3, 5, 0]
    assert apportion([3.0, 5.0], [10, 30], [(0, 10), (0, 30)], 12) == [4, 8]  # moved by a tenth of each
    assert apportion([9.0, 9.0], [10, 10], [(0, 9), (0, 9)], 19) in ([10, 9], [9, 10])  # the sum comes first
    # moved to 1.6 and 2.4: the larger remainder is rounded up, not the layer that ends at its bound
    assert apportion([1.5, 2.3], [10, 10], [(0, 10), (0, 3)], 4) == [2, 2]
    assert sorted(apportion([1.0, 1.0], [1, 1], [(1, 1), (1, 1)], 1)) == [0, 1]  # also where a layer ends with none


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=4),
    sparsity=st.floats(0.05, 0.95),
    seed=st.integers(0, 99),
)
def test_within_a_layer_the_lowest_scores_go_whatever_the_bounds(sizes: list[int], sparsity: float, seed: int) -> None:
    """Also where whole numbers cannot meet the bounds, as with `most` at the sparsity itself."""
    generator = torch.Generator().manual_seed(seed)
    scores = {str(i): torch.rand(size, generator=generator, dtype=torch.float64) for i, size in enumerate(sizes)}
    pattern = Unstructured(sparsity, "global", least=sparsity, most=sparsity)
    masks = keep_best(scores, sparsity, {name: pattern.bounds(len(score)) for name, score in scores.items()})
    assert sum(int((~mask).sum()) for mask in masks.values()) == round(sparsity * sum(sizes))
    for name, mask in masks.items():
        if mask.any() and not mask.all():
            assert float(scores[name][~mask].max()) <= float(scores[name][mask].min())


# The rules one by one

LAYERS = {"small": (4, 6), "conv": (8, 4, 3, 3), "wide": (20, 40)}


def test_uniform_is_the_same_share_of_every_layer() -> None:
    gone = spread(FakeMeasured(LAYERS), Unstructured(0.75, "uniform"))
    assert gone == {"small": 18, "conv": 216, "wide": 600}


@pytest.mark.parametrize(
    ("pattern", "shapes", "warned"),
    [
        (Unstructured(0.7), {"a": (8, 1, 3, 3), "b": (8, 8, 1, 1), "c": (8, 1, 5, 5)}, True),
        (Unstructured(0.5), {"a": (8, 1, 3, 3), "b": (8, 8, 1, 1), "c": (8, 1, 5, 5)}, True),
        (Unstructured(0.7, "uniform"), {"a": (8, 1, 3, 3), "b": (8, 8, 1, 1)}, False),  # explicit
        (Unstructured(0.7, "global"), {"a": (8, 1, 3, 3), "b": (8, 8, 1, 1)}, False),
        (Unstructured(0.49), {"a": (8, 1, 3, 3), "b": (8, 8, 1, 1)}, False),  # harmless
        (Unstructured(0.7), {"a": (8, 1, 3, 3)}, False),  # no other layer to remove more of
        (Unstructured(0.7), {"a": (8, 2, 3, 3), "b": (8, 1)}, False),  # not depthwise
    ],
)
def test_the_same_share_of_depthwise_layers_is_worth_a_warning(
    pattern: Unstructured, shapes: Shapes, warned: bool
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spread(FakeMeasured(shapes), pattern)
    words = f"of 2 depthwise ones, which have as few as 9 weights for an output; write '{pattern} global' to spare"
    assert [words in str(warning.message) for warning in caught] == [True] * warned


def test_global_is_the_magnitude_of_all_together() -> None:
    network = FakeMeasured(LAYERS)
    network.weights["small"] *= 1.5
    gone = spread(network, Unstructured(0.5, "global", most=1.0))
    everything = torch.cat([w.abs().flatten() for w in network.weights.values()])
    threshold = float(everything.sort().values[round(0.5 * len(everything))])
    assert gone == {name: int((w.abs() < threshold).sum()) for name, w in network.weights.items()}


def test_erk_by_hand() -> None:
    """Density in proportion to (inputs + outputs + kernel) / size, where that is below one."""
    network = FakeMeasured({"a": (10, 20), "b": (8, 5, 3, 3), "c": (20, 30)})
    raw = {"a": 30 / 200, "b": 19 / 360, "c": 50 / 600}
    factor = 0.2 * 1160 / (30 + 19 + 50)
    assert all(factor * r < 1 for r in raw.values())
    gone = spread(network, Unstructured(0.8, "erk"))
    for name, w in network.weights.items():
        assert abs(gone[name] - w.numel() * (1 - factor * raw[name])) < 1
    # a layer whose density would be above one stays whole, and the others share what is left
    network = FakeMeasured({"tiny": (2, 2), "large": (30, 30)})
    gone = spread(network, Unstructured(0.5, "erk"))
    assert gone == {"tiny": 0, "large": 452}


def test_lamp_scores_by_definition() -> None:
    weight = FakeMeasured({"a": (3, 4, 2, 1)}).weights["a"]
    flat = weight.flatten().tolist()
    for score, w in zip(lamp_scores(weight).flatten().tolist(), flat, strict=True):
        assert score == pytest.approx(w**2 / sum(v**2 for v in flat if v**2 >= w**2))
    assert float(lamp_scores(torch.zeros(2, 3)).abs().max()) == 0  # no division by nothing


def test_lamp_ranks_those_scores_together() -> None:
    network = FakeMeasured(LAYERS)
    network.weights["wide"] *= 100  # which changes nothing: scores are relative to their layer
    gone = spread(network, Unstructured(0.6, "lamp", most=1.0))
    scores = {name: lamp_scores(w).flatten() for name, w in network.weights.items()}
    threshold = float(torch.cat(list(scores.values())).sort().values[round(0.6 * 1112)])
    assert gone == {name: int((score < threshold).sum()) for name, score in scores.items()}


def test_owl_keeps_more_where_there_are_more_outliers() -> None:
    shapes = dict.fromkeys("abc", (20, 30))
    network = FakeMeasured(shapes)
    for name, outliers in {"a": 0, "b": 30, "c": 12}.items():
        network.weights[name] = torch.full((20, 30), 0.1, dtype=torch.float64)
        network.weights[name].view(-1)[:outliers] = 2.0
    # the shares of scores above five times the mean: 0, 30 and 12 of 600
    gone = spread(network, Unstructured(0.6, "owl"))
    ideal = {"a": 0.68, "b": 0.52, "c": 0.6 - 0.16 * (12 - 15) / 30}
    shift = 0.6 - sum(ideal.values()) / 3
    for name, count in gone.items():
        assert count / 600 == pytest.approx(ideal[name] + shift, abs=1 / 600)
    assert gone["b"] < gone["c"] < gone["a"]


def test_owl_reads_the_norms_of_inputs_too() -> None:
    network = FakeMeasured({"a": (20, 30), "b": (20, 30)})
    network.weights = {name: torch.ones(20, 30, dtype=torch.float64) for name in network.weights}
    loud = torch.eye(30, dtype=torch.float64)
    loud[3, 3] = 400.0  # one input with twenty times the norm of the others
    network.grams = lambda: iter([("b", loud[None]), ("a", torch.eye(30, dtype=torch.float64)[None])])  # type: ignore[method-assign]
    gone = spread(network, Unstructured(0.5, "owl"))
    assert gone == {"a": 348, "b": 252}


def test_measured_spares_the_layer_that_matters() -> None:
    shapes = dict.fromkeys("abc", (12, 10))
    even = spread(FakeMeasured(shapes), Unstructured(0.7, "measured"))
    gone = spread(FakeMeasured(shapes, matters={"a": 1.0, "b": 50.0, "c": 1.0}), Unstructured(0.7, "measured"))
    assert sum(even.values()) == sum(gone.values()) == 252
    assert gone["b"] < even["b"]
    assert gone["b"] < min(gone["a"], gone["c"])
    bounded = Unstructured(0.7, "measured", least=0.6, most=0.8)
    held = spread(FakeMeasured(shapes, matters={"a": 1.0, "b": 50.0, "c": 1.0}), bounded)
    assert gone["b"] < held["b"] == 72


def random_levels(seed: int) -> tuple[list[list[float]], list[list[float]]]:
    generator = torch.Generator().manual_seed(seed)
    errors, gains = [], []
    for levels in (4, 3, 5, 4):
        errors.append([0.0, *torch.rand(levels - 1, generator=generator).cumsum(0).tolist()])
        gains.append([0.0, *torch.randint(1, 40, (levels - 1,), generator=generator).cumsum(0).tolist()])
    return errors, gains


@pytest.mark.parametrize("seed", range(8))
def test_cheapest_levels_are_the_best_of_all(seed: int) -> None:
    errors, gains = random_levels(seed)
    most = sum(own[-1] for own in gains)
    for share in (0.1, 0.35, 0.6, 0.9):
        needed = round(share * most)
        chosen = cheapest_levels(errors, gains, needed)
        assert sum(own[level] for own, level in zip(gains, chosen, strict=True)) >= needed
        best = min(
            sum(own[level] for own, level in zip(errors, levels, strict=True))
            for levels in product(*(range(len(own)) for own in errors))
            if sum(own[level] for own, level in zip(gains, levels, strict=True)) >= needed * (1 + 5e-4)
        )  # but for the width of buckets
        assert sum(own[level] for own, level in zip(errors, chosen, strict=True)) <= best + 1e-12
    assert cheapest_levels(errors, gains, 2 * most) == [len(own) - 1 for own in errors]  # out of reach: all there is


def work_removed(network: FakeMeasured, gone: Mapping[str, int]) -> float:
    total = sum(network.uses[name] * w.numel() for name, w in network.weights.items())
    return sum(network.uses[name] * count for name, count in gone.items()) / total


@settings(max_examples=60)
@given(
    shapes=shapes,
    share=st.floats(0.05, 0.95),
    uses=st.lists(st.integers(1, 200), min_size=4, max_size=4),
    rule=st.sampled_from(["measured", "uniform", None]),
)
def test_a_share_of_flops_is_removed_at_least(shapes: Shapes, share: float, uses: list[int], rule: Any) -> None:
    network = FakeMeasured(shapes, uses=dict(zip(shapes, uses, strict=False)))
    gone = spread(network, Unstructured(share, rule, of="flops", most=1.0), default="global")
    assert work_removed(network, gone) >= share - 1e-9


def test_a_share_of_flops_comes_from_where_they_are() -> None:
    shapes = {"early": (8, 4, 3, 3), "late": (40, 20)}
    network = FakeMeasured(shapes, uses={"early": 400, "late": 1})
    gone = spread(network, Unstructured(0.5, "measured", of="flops"))
    assert 0.5 <= work_removed(network, gone) <= 0.62
    assert gone["late"] == 0  # a few hundred multiplications, not worth an error
    assert sum(gone.values()) < 0.5 * 1088


def test_patterns_are_spread_among_their_own_layers() -> None:
    network = FakeMeasured({"a": (4, 4), "b": (8, 8), "c": (4, 8), "d": (8, 4)})
    half, more = Unstructured(0.5, "erk"), Unstructured(0.75)
    patterns: dict[str, Pattern] = {"a": half, "b": half, "c": more, "d": NM(2, 4)}
    made = spread_out(patterns, network, "uniform", False)
    assert list(made) == list(patterns)
    assert made["d"] == NM(2, 4)
    gone = removed(made, network)
    assert gone["a"] + gone["b"] == 40
    assert gone["c"] == 24
    assert gone["d"] == 16


def test_methods_that_rank_together_are_left_to_it() -> None:
    network = FakeMeasured({"a": (4, 4), "b": (8, 8)})
    patterns: dict[str, Pattern] = dict.fromkeys(network.weights, Unstructured(0.5, most=0.8))
    left = spread_out(patterns, network, "global", True)
    assert set(left.values()) == {Unstructured(0.5, "global", most=0.8)}
    told = spread_out(dict.fromkeys(network.weights, Unstructured(0.5, "erk")), network, "global", True)
    assert all(isinstance(pattern, Unstructured) and pattern.spread == "uniform" for pattern in told.values())


@pytest.mark.parametrize("rule", ["owl", "measured"])
def test_what_is_measured_belongs_to_its_layer_in_any_order(rule: Any) -> None:
    shapes = {"a": (20, 30), "b": (20, 30)}
    network = FakeMeasured(shapes, matters={"a": 20.0, "b": 1.0})
    network.weights["a"].view(-1)[:40] *= 30
    order: Callable[[list[str]], dict[str, int]] = lambda names: removed(  # noqa: E731
        spread_out({name: Unstructured(0.5, rule) for name in names}, network, "uniform", False), network
    )
    assert order(["a", "b"]) == order(["b", "a"])
    assert order(["a", "b"])["a"] < order(["a", "b"])["b"]


def test_a_layer_may_go_as_a_whole_where_nothing_is_left_of_it() -> None:
    network = FakeMeasured({"a": (1, 1), "b": (1, 1), "c": (1, 2)})
    gone = spread(network, Unstructured(0.75, "uniform", most=1.0))
    assert sum(gone.values()) == 3


@pytest.mark.parametrize("rule", SPREADS)
def test_nothing_is_spread_where_nothing_is_removed(rule: Any) -> None:
    assert set(spread(FakeMeasured(LAYERS), Unstructured(0.0, rule)).values()) == {0}


def test_every_spread_has_its_rule() -> None:
    assert set(snows.patterns.budgets._RULES) == set(SPREADS)
