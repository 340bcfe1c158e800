"""Every mask method on any layer: exact counts, valid groups, weights where they are kept, and nothing else touched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from snows.masks import Choice
from snows.masks.alps import ALPS
from snows.masks.cap import CAP
from snows.masks.cbs import CBS
from snows.masks.chita import CHITA
from snows.masks.exchange import Exchange
from snows.masks.falcon import FALCON
from snows.masks.magnitude import Magnitude
from snows.masks.obc import OBC
from snows.masks.random import Random
from snows.masks.sparsegpt import SparseGPT
from snows.masks.wanda import Wanda
from snows.masks.woodfisher import WoodFisher
from snows.patterns import NM, Pattern, Unstructured
from tests.masks import FakeNetwork

LAYER_METHODS = [Wanda(), SparseGPT(), SparseGPT(block=3), OBC(), ALPS(steps=30), Exchange("wanda")]
WITHOUT_NM = [CBS(tries=3, passes=3), CHITA(), CHITA(steps=5, block=None), CHITA(steps=5, block=7), FALCON()]
WITH_NM = [Magnitude(), Random(), WoodFisher(block=9), CAP(damping=1e-4, block=4)]
each_layer_method = pytest.mark.parametrize("method", LAYER_METHODS, ids=repr)

seeds = st.integers(0, 2**31 - 1)
sparsities = st.floats(0.01, 0.99)
dtypes = st.sampled_from([torch.float32, torch.float64])


@st.composite
def layers(draw: st.DrawFn, channels: int = 1) -> tuple[tuple[int, ...], int]:
    """The shape of a weight and its groups: linear, or a convolution in one to three dimensions, grouped or not."""
    kernel = draw(st.lists(st.integers(1, 3), max_size=3))
    groups = draw(st.integers(1, 3)) if kernel else 1
    return (groups * draw(st.integers(1, 3)), channels * draw(st.integers(1, 3)), *kernel), groups


@st.composite
def nm_patterns(draw: st.DrawFn) -> NM:
    m = draw(st.integers(2, 5))
    return NM(draw(st.integers(1, m - 1)), m)


def statistics(shape: tuple[int, ...], groups: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight as layers hold it in memory, and second moments, singular ones among them."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if weight.ndim == 4:
        weight = weight.to(memory_format=torch.channels_last)
    columns = math.prod(shape[1:])
    x = torch.randn(groups, 5 + seed % 40, columns, generator=generator, dtype=torch.float64)
    x[..., seed % columns] *= seed % 2  # a dead input now and then
    return weight, x.mT @ x / x.shape[1]


def check_choice(choice: Choice, weights: dict[str, Tensor]) -> None:
    assert choice.masks.keys() == weights.keys()
    assert choice.weights.keys() <= weights.keys()
    for name, mask in choice.masks.items():
        assert mask.dtype == torch.bool
        assert mask.shape == weights[name].shape
    for name, weight in choice.weights.items():
        assert weight.dtype == weights[name].dtype
        assert weight.shape == weights[name].shape
        assert torch.isfinite(weight).all()
        assert not weight[~choice.masks[name]].any()


def same(one: Choice, two: Choice) -> bool:
    return all(torch.equal(mask, two.masks[name]) for name, mask in one.masks.items()) and all(
        torch.equal(weight, two.weights[name]) for name, weight in one.weights.items()
    )


def ask_layer(method: Any, layer: tuple[tuple[int, ...], int], pattern: Pattern, seed: int, dtype: Any) -> Tensor:
    weight, gram = statistics(*layer, seed, dtype)
    before = weight.clone(), gram.clone()
    choice = method.choose_layer("w", weight, gram, pattern)
    assert torch.equal(weight, before[0])
    assert torch.equal(gram, before[1])
    check_choice(choice, {"w": weight})
    assert same(choice, method.choose_layer("w", weight, gram, pattern))
    return choice.masks["w"]


def check_groups(mask: Tensor, pattern: NM) -> None:
    """Spelled out: at each output and kernel position, N of every M consecutive input channels."""
    for begin in range(0, mask.shape[1], pattern.m):
        assert (mask[:, begin : begin + pattern.m].sum(1) == pattern.n).all()


@each_layer_method
@settings(max_examples=30)
@given(layer=layers(), sparsity=sparsities, seed=seeds, dtype=dtypes)
def test_layer_methods_remove_the_share_to_the_weight(
    method: Any, layer: tuple[tuple[int, ...], int], sparsity: float, seed: int, dtype: torch.dtype
) -> None:
    mask = ask_layer(method, layer, Unstructured(sparsity), seed, dtype)
    assert int((~mask).sum()) == round(sparsity * mask.numel())


@each_layer_method
@settings(max_examples=30)
@given(pattern=nm_patterns(), data=st.data(), seed=seeds, dtype=dtypes)
def test_layer_methods_obey_nm(method: Any, pattern: NM, data: st.DataObject, seed: int, dtype: torch.dtype) -> None:
    check_groups(ask_layer(method, data.draw(layers(channels=pattern.m)), pattern, seed, dtype), pattern)


def ask_network(method: Any, network: FakeNetwork) -> Choice:
    weights = {name: weight.clone() for name, weight in network.weights.items()}
    rows = {name: row.clone() for name, row in network.rows.items()}
    choice: Choice = method.choose(network)
    assert all(torch.equal(weight, weights[name]) for name, weight in network.weights.items())
    assert all(torch.equal(row, rows[name]) for name, row in network.rows.items())
    check_choice(choice, weights)
    assert same(choice, method.choose(network))
    return choice


@pytest.mark.parametrize("method", WITHOUT_NM + WITH_NM, ids=repr)
@settings(max_examples=25)
@given(
    made=st.lists(layers(), min_size=1, max_size=3),
    sparsity=sparsities,
    together=st.booleans(),
    zeros=st.booleans(),
    seed=st.integers(0, 999),
    dtype=dtypes,
)
def test_network_methods_remove_the_share_to_the_weight(
    method: Any,
    made: list[tuple[tuple[int, ...], int]],
    sparsity: float,
    together: bool,
    zeros: bool,
    seed: int,
    dtype: torch.dtype,
) -> None:
    shapes = {str(i): shape for i, (shape, _) in enumerate(made)}
    pattern = Unstructured(sparsity, "global" if together else "uniform")
    network = FakeNetwork(shapes, pattern, samples=6, seed=seed, dtype=dtype)
    if zeros:  # as in a network that was pruned before: no score tells them apart
        for name, weight in network.weights.items():
            weight.view(-1)[::2] = 0
            network.rows[name][:, ::4] = 0
    masks = ask_network(method, network).masks
    if together:
        total = sum(mask.numel() for mask in masks.values())
        assert sum(int((~mask).sum()) for mask in masks.values()) == round(sparsity * total)
    else:
        assert all(int((~mask).sum()) == round(sparsity * mask.numel()) for mask in masks.values())


@pytest.mark.parametrize("method", WITH_NM, ids=repr)
@settings(max_examples=25)
@given(pattern=nm_patterns(), data=st.data(), sparsity=sparsities, seed=st.integers(0, 999))
def test_network_methods_obey_nm_beside_other_patterns(
    method: Any, pattern: NM, data: st.DataObject, sparsity: float, seed: int
) -> None:
    shapes = {name: data.draw(layers(channels=pattern.m))[0] for name in "ab"} | {"c": data.draw(layers())[0]}
    patterns = {"a": pattern, "b": pattern, "c": Unstructured(sparsity, "global")}
    masks = ask_network(method, FakeNetwork(shapes, patterns, samples=6, seed=seed)).masks
    assert list(masks) == ["a", "b", "c"]
    check_groups(masks["a"], pattern)
    check_groups(masks["b"], pattern)
    assert int((~masks["c"]).sum()) == round(sparsity * masks["c"].numel())


@settings(max_examples=30)
@given(
    made=st.lists(layers(), min_size=1, max_size=3),
    uses=st.lists(st.integers(1, 50), min_size=3, max_size=3),
    sparsity=sparsities,
    flops=st.floats(0.01, 0.99),
    seed=st.integers(0, 999),
)
def test_falcon_obeys_both_budgets(
    made: list[tuple[tuple[int, ...], int]], uses: list[int], sparsity: float, flops: float, seed: int
) -> None:
    shapes = {str(i): shape for i, (shape, _) in enumerate(made)}
    network = FakeNetwork(
        shapes, Unstructured(sparsity, "global"), seed=seed, uses=dict(zip(shapes, uses, strict=False))
    )
    masks = ask_network(FALCON(flops=flops, solver=CHITA(steps=5, block=None)), network).masks
    costs = sorted(network.uses[name] for name, mask in masks.items() for _ in range(mask.numel()))
    work = (1 - flops) * sum(costs)
    assert sum(network.uses[name] * int(mask.sum()) for name, mask in masks.items()) <= work + 1e-9
    count = len(costs) - round(sparsity * len(costs))
    kept = sum(int(mask.sum()) for mask in masks.values())
    assert kept == count if sum(costs[:count]) <= work else kept < count
