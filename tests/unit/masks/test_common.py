"""What mask methods have in common."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from snows.errors import ArgumentError, InputError
from snows.linalg import rows as layout
from snows.masks.alps import ALPS
from snows.masks.cbs import CBS
from snows.masks.chita import CHITA
from snows.masks.exchange import Exchange
from snows.masks.falcon import FALCON
from snows.masks.magnitude import Magnitude
from snows.masks.obc import OBC
from snows.masks.random import Random
from snows.masks.sparsegpt import SparseGPT
from snows.patterns import NM, Pattern, Unstructured
from tests.masks import TWO_LAYERS, FakeNetwork, layer

BOTH_WAYS = [CHITA(steps=40, block=None), CBS(least_gain=0.0)]


@pytest.mark.parametrize("method", BOTH_WAYS, ids=lambda m: type(m).__name__)
def test_a_search_over_the_network_keeps_to_each_layers_pattern(method: Any) -> None:
    """Whatever would be gained by it, weights move between layers only as far as their patterns allow."""
    shapes = {"a": (6, 5), "b": (4, 10), "c": (3, 10)}
    moved = 0
    for seed in range(5):
        own: dict[str, Pattern] = {
            "a": Unstructured(0.3, "uniform"), "b": Unstructured(0.6, "uniform"), "c": Unstructured(0.9, "uniform"),
        }  # fmt: skip
        network = FakeNetwork(shapes, own, seed=seed, samples=150, common=0)
        network.rows["a"] *= 2  # so that all of its weights would be had back
        masks = method.choose(network).masks
        assert [int((~mask).sum()) for mask in masks.values()] == [9, 24, 27]
        bounded = FakeNetwork(
            shapes, Unstructured(0.5, "global", least=0.4, most=0.6), seed=seed, samples=150, common=0
        )
        bounded.rows["a"] *= 2
        masks = method.choose(bounded).masks
        gone = [int((~mask).sum()) for mask in masks.values()]
        assert sum(gone) == 50
        assert all(0.4 <= count / mask.numel() <= 0.6 for count, mask in zip(gone, masks.values(), strict=True))
        moved += gone != [int((~mask).sum()) for mask in Magnitude().choose(bounded).masks.values()]
    assert moved  # within their bounds they do


@pytest.mark.parametrize("method", [CBS(), CHITA(), FALCON(), FALCON(flops=0.5)], ids=repr)
def test_methods_without_nm_say_which_have_it(method: Any) -> None:
    network = FakeNetwork({"a": (4, 4), "head.weight": (4, 8)}, {"a": Unstructured(0.5), "head.weight": NM(2, 4)})
    words = f"{type(method).__name__} chooses unstructured masks only; head.weight has the pattern 2:4. For N:M take "
    with pytest.raises(ArgumentError, match=words) as caught:
        method.choose(network)
    for name in ("magnitude", "wanda", "sparsegpt", "obc", "alps", "exchange", "woodfisher", "cap"):
        assert repr(name) in str(caught.value)


def test_random_masks_come_from_the_seed() -> None:
    first, again, other = (
        Random().choose(FakeNetwork(TWO_LAYERS, Unstructured(0.5), seed=seed)).masks["a"] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("method", [OBC(), SparseGPT(), ALPS(), Exchange()], ids=lambda m: type(m).__name__)
def test_inputs_that_are_dead_or_not_finite(method: Any) -> None:
    weight = layer("linear")[0]
    mask = method.choose_layer("w", weight, torch.zeros(1, 8, 8, dtype=torch.float64), Unstructured(0.5)).masks["w"]
    assert int(mask.sum()) == 20
    _, gram = layer("linear")
    gram[0, 3], gram[0, :, 3] = 0, 0
    choice = method.choose_layer("w", weight, gram, NM(2, 4))
    assert torch.isfinite(choice.weights["w"]).all()
    if not isinstance(method, ALPS | Exchange):  # which may find others that are free by what makes up for them
        assert not choice.masks["w"][:, 3].any()  # what reads nothing goes first
    with pytest.raises(InputError, match="inputs are not finite"):
        method.choose_layer("w", weight, gram * math.nan, Unstructured(0.5))


@pytest.mark.parametrize("shape", [(4, 2, 1), (4, 4, 3, 3), (4, 6)])
def test_weights_come_back_in_their_memory_layout(shape: tuple[int, ...]) -> None:
    """Also where a dimension of 1 leaves it open: activations take their layout from it, and views fail on another."""
    for weight in (torch.randn(shape), torch.randn(shape).transpose(0, 1).contiguous().transpose(0, 1)):
        columns = weight[0].numel()
        rows, _ = layout.as_rows(weight, torch.eye(columns)[None])
        back = layout.from_rows(rows, weight)
        assert torch.equal(back, weight)
        assert back.stride() == weight.stride()
