"""CAP against greedy elimination within the blocks of a Fisher matrix that is formed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from snows.masks.cap import CAP
from snows.patterns import NM, Unstructured
from tests.masks import FakeNetwork, best_fit, fisher_of, greedy

CAP_LAYERS = {"a": (3, 4), "b": (2, 4, 1, 3), "c": (5, 7)}
CAP_WIDTHS = {"a": 6, "b": 6, "c": 5}  # the next divisor of 12, 24, 35 from 5 on


def test_cap_is_greedy_within_blocks_and_ranks_their_sums_together() -> None:
    network = FakeNetwork(CAP_LAYERS, Unstructured(0.45, "global", most=1.0), samples=9)
    choice = CAP(damping=1e-2, block=5).choose(network)
    costs = []
    for name, weight in network.weights.items():
        w, width = weight.flatten().numpy(), CAP_WIDTHS[name]
        if name == "c":
            width = 5
        for begin in range(0, len(w), width):
            part = slice(begin, begin + width)
            fisher = fisher_of(network.rows[name][:, part], 1e-2).numpy()
            order, losses = greedy(w[part], fisher, width, [0] * width)
            costs += [(float(cost), name, begin + p) for p, cost in zip(order, np.cumsum(losses), strict=True)]
    removed = round(0.45 * 71)
    gone = {(name, p) for _, name, p in sorted(costs)[:removed]}
    for name, mask in choice.masks.items():
        assert {(name, p) for p in (~mask.flatten()).nonzero().flatten().tolist()} == {g for g in gone if g[0] == name}
        w, width = network.weights[name].flatten().numpy(), CAP_WIDTHS[name]
        for begin in range(0, len(w), width):
            part = slice(begin, begin + width)
            fisher = fisher_of(network.rows[name][:, part], 1e-2).numpy()
            expected = best_fit(w[part], fisher, mask.flatten()[part].numpy())
            torch.testing.assert_close(
                choice.weights[name].flatten()[part], torch.tensor(expected), rtol=1e-6, atol=1e-8
            )


@pytest.mark.parametrize("pattern", [NM(1, 4), NM(2, 4), NM(1, 2)], ids=str)
def test_cap_with_nm_is_greedy_with_a_count_for_each_group(pattern: NM) -> None:
    shape = (3, 4, 2, 1)
    network = FakeNetwork({"a": shape}, pattern, samples=9)
    choice = CAP(damping=1e-2, block=8).choose(network)
    assert (choice.masks["a"].sum(1) == 4 * pattern.n // pattern.m).all()
    assert pattern.violations(choice.masks["a"]) == 0
    # blocks of two times four channels side by side
    places = [(o, c, k) for o in range(3) for k in range(2) for c in range(4)]
    w = np.array([float(network.weights["a"][o, c, k, 0]) for o, c, k in places])
    columns = [o * 8 + c * 2 + k for o, c, k in places]
    for begin in range(0, 24, 8):
        part = slice(begin, begin + 8)
        fisher = fisher_of(network.rows["a"][:, columns[part]], 1e-2).numpy()
        gone = pattern.m - pattern.n
        order, _ = greedy(w[part], fisher, 8 * gone // pattern.m, [p // pattern.m for p in range(8)], gone)
        kept = np.array([p not in order for p in range(8)])
        expected = best_fit(w[part], fisher, kept)
        for (o, c, k), stays, value in zip(places[part], kept, expected, strict=True):
            assert bool(choice.masks["a"][o, c, k, 0]) == bool(stays)
            assert float(choice.weights["a"][o, c, k, 0]) == pytest.approx(float(value), rel=1e-6, abs=1e-8)


def test_cap_survives_gradients_far_above_its_damping() -> None:
    """In single precision: fewer gradients than a block is wide, so that the damping alone makes it regular."""
    network = FakeNetwork({"a": (8, 16)}, Unstructured(0.5, "global"), samples=20, dtype=torch.float32)
    network.rows = {name: 30 * rows for name, rows in network.rows.items()}
    choice = CAP().choose(network)
    assert torch.isfinite(choice.weights["a"]).all()
