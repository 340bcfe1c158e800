"""Magnitude against sorting, layer by layer and together."""

from __future__ import annotations

import torch

from snows.masks.magnitude import Magnitude
from snows.patterns import NM, Unstructured
from tests.masks import TWO_LAYERS, FakeNetwork


def test_a_sparsity_removes_the_smallest_of_all_layers() -> None:
    network = FakeNetwork(TWO_LAYERS, Unstructured(0.6, "global", most=1.0))
    everything = sorted((abs(v), name) for name, w in network.weights.items() for v in w.flatten().tolist())
    threshold = everything[12][0]
    choice = Magnitude().choose(network)
    assert not choice.weights
    for name, mask in choice.masks.items():
        assert torch.equal(mask, network.weights[name].abs() >= threshold)


def test_n_of_m_removes_the_smallest_of_each_group() -> None:
    network = FakeNetwork({"a": (2, 4)}, NM(1, 4))
    mask = Magnitude().choose(network).masks["a"]
    for row, kept in zip(network.weights["a"].tolist(), mask.tolist(), strict=True):
        assert [abs(v) == max(map(abs, row)) for v in row] == kept
