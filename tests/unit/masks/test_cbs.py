"""CBS: what swaps are priced at, and weights that are those of the pruned block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from snows.masks.cbs import CBS, _Swaps
from snows.masks.fisher import slices
from snows.masks.magnitude import Magnitude
from snows.patterns import Unstructured
from tests.masks import TWO_LAYERS, FakeNetwork, fisher_of


def model_cost(network: FakeNetwork, masks: Mapping[str, Tensor]) -> float:
    """w_P' F_PP w_P, layer by layer, with F formed."""
    total = 0.0
    for name, mask in masks.items():
        gone = (network.weights[name] * ~mask).flatten()
        total += float(gone @ fisher_of(network.rows[name], 0.0) @ gone)
    return total


@pytest.mark.parametrize("spread", ["global", "uniform"])
def test_swaps_are_priced_by_what_they_change(spread: Any) -> None:
    pattern = Unstructured(0.5, spread)
    network = FakeNetwork(TWO_LAYERS, pattern)
    masks = {name: pattern.best_mask(w.abs()) for name, w in network.weights.items()}
    state = _Swaps(network, {name: mask.clone() for name, mask in masks.items()}, 10)
    place = [(name, i) for name, mask in masks.items() for i in range(mask.numel())]
    removed, kept = state.ranked()
    assert sorted(removed + kept) == list(range(len(place)))
    before = model_cost(network, masks)
    for i in removed:
        for j, gain in zip(kept, state.gains(i, kept), strict=True):
            if spread == "uniform" and place[i][0] != place[j][0]:
                assert gain == -math.inf
                continue
            swapped = {name: mask.clone() for name, mask in masks.items()}
            swapped[place[i][0]].view(-1)[place[i][1]] = True
            swapped[place[j][0]].view(-1)[place[j][1]] = False
            assert gain == pytest.approx(before - model_cost(network, swapped), rel=1e-8, abs=1e-10)
    # the ranking: what the cost falls by if one comes back, and rises by if one goes
    falls = [before - model_cost(network, flip(masks, place[p])) for p in removed]
    rises = [model_cost(network, flip(masks, place[p])) - before for p in kept]
    assert falls == sorted(falls, reverse=True)
    assert rises == sorted(rises)
    # and after a swap the state is that of the new masks
    i, j = removed[0], next(j for j in kept if place[j][0] == place[removed[0]][0])
    state.swap(i, j)
    fresh = _Swaps(network, state.masks(), 10)
    torch.testing.assert_close(state.u, fresh.u)
    other = next((j for j in kept[1:] if place[j][0] != place[i][0]), None)
    if other is not None:  # also of a swap between layers
        fresh.swap(j, other)
        torch.testing.assert_close(fresh.gone, _Swaps(network, fresh.masks(), 10).gone)
    assert int(state.kept.sum()) == sum(int(mask.sum()) for mask in masks.values())


def flip(masks: Mapping[str, Tensor], place: tuple[str, int]) -> dict[str, Tensor]:
    changed = {name: mask.clone() for name, mask in masks.items()}
    changed[place[0]].view(-1)[place[1]] ^= True
    return changed


@pytest.mark.parametrize("spread", ["global", "uniform"])
@pytest.mark.parametrize("seed", range(4))
def test_cbs_is_no_worse_than_magnitude_and_exact(seed: int, spread: Any) -> None:
    network = FakeNetwork({"a": (6, 5), "b": (4, 3, 2, 1)}, Unstructured(0.6, spread), seed=seed)
    method = CBS(block=9, damping=1e-3)
    choice = method.choose(network)

    def masked_loss(masks: Mapping[str, Tensor]) -> float:
        return network.loss({name: network.weights[name] * mask for name, mask in masks.items()})

    assert masked_loss(choice.masks) <= masked_loss(Magnitude().choose(network).masks)
    assert sum(int((~mask).sum()) for mask in choice.masks.values()) == round(0.6 * 54)
    if spread == "uniform":
        assert [int((~mask).sum()) for mask in choice.masks.values()] == [18, 14]
    for name, weight in network.weights.items():
        w, kept = weight.flatten(), choice.masks[name].flatten()
        for part in slices(len(w), 9):
            inverse = torch.linalg.inv(fisher_of(network.rows[name][:, part], 1e-3))
            gone = ~kept[part]
            price = torch.linalg.solve(inverse[gone][:, gone], w[part][gone])
            expected = w[part] - inverse[:, gone] @ price
            torch.testing.assert_close(choice.weights[name].flatten()[part], expected, rtol=1e-6, atol=1e-8)


def test_swaps_find_what_magnitude_cannot_see() -> None:
    """Two large weights whose gradients cancel each other cost nothing together."""
    network = FakeNetwork({"a": (1, 6)}, Unstructured(1 / 3, "uniform"), samples=30)
    with torch.no_grad():
        network.weights["a"].copy_(torch.tensor([[2.0, 2.0, 1.0, 1.0, 1.0, 1.0]]))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(30, 6, generator=generator, dtype=torch.float64)
    rows[:, 1] = -rows[:, 0]
    network.rows = {"a": rows}
    # the first swap of the pair costs more than it gains, so a random start or a lucky pass has to find it
    choice = CBS(reach=6).choose(network)
    assert model_cost(network, choice.masks) <= model_cost(network, Magnitude().choose(network).masks)


def test_swaps_lower_the_loss_of_a_single_start() -> None:
    """With magnitude as the only start, whatever is gained is gained by swaps."""
    lowered = 0
    for seed in range(4):
        network = FakeNetwork({"a": (6, 5), "b": (4, 3, 2, 1)}, Unstructured(0.5, "global"), seed=seed)
        before = model_cost(network, Magnitude().choose(network).masks)
        after = model_cost(network, CBS(tries=1).choose(network).masks)
        assert after <= before
        lowered += after < 0.9 * before
    assert lowered >= 3
