"""Random masks: exact, from the seed alone, and the same share of every layer."""

from __future__ import annotations

import torch

from snows.masks.random import Random
from snows.patterns import NM, Unstructured
from tests.masks import TWO_LAYERS, FakeNetwork


def test_masks_come_from_the_seed() -> None:
    first, again, other = (
        Random().choose(FakeNetwork(TWO_LAYERS, Unstructured(0.5), seed=seed)).masks for seed in (1, 1, 2)
    )
    for name in TWO_LAYERS:
        assert torch.equal(first[name], again[name])
        assert int(first[name].sum()) == first[name].numel() // 2
    assert not torch.equal(first["a"], other["a"])


def test_every_weight_has_the_same_chance() -> None:
    kept = torch.zeros(2, 4)
    for seed in range(300):
        kept += Random().choose(FakeNetwork({"a": (2, 4)}, NM(1, 4), seed=seed)).masks["a"]
    assert float((kept / 300 - 0.25).abs().max()) < 0.08
