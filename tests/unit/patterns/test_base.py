"""A kind of pattern added from outside: what it must say, what it gets for nothing, and a network pruned to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import snows
from snows.errors import ArgumentError, SnowsWarning
from snows.masks.alps import ALPS
from snows.masks.cap import CAP
from snows.masks.cbs import CBS
from snows.masks.exchange import Exchange
from snows.masks.falcon import FALCON
from snows.masks.magnitude import Magnitude
from snows.masks.obc import OBC
from snows.masks.sparsegpt import SparseGPT
from snows.masks.wanda import Wanda
from snows.patterns import NM, Budget, Pattern, Unstructured
from snows.patterns.budgets import spread_out
from tests.masks import FakeNetwork, layer


@dataclass(frozen=True)
class BlockRows(Pattern):
    """Whole outputs of a layer are removed, in blocks of `height`."""

    sparsity: float
    height: int = 2

    def __str__(self) -> str:
        return f"{self.sparsity} in blocks of {self.height} rows"

    def refusal(self, shape: torch.Size) -> str | None:
        return None if shape[0] % self.height == 0 else f"its {shape[0]} outputs are no multiple of {self.height}"

    def best_mask(self, score: Tensor) -> Tensor:
        blocks = score.flatten(1).sum(1).view(-1, self.height).sum(1)
        kept = torch.ones(len(blocks), dtype=torch.bool)
        kept[blocks.argsort(stable=True)[: round(self.sparsity * len(blocks))]] = False
        rows = kept.repeat_interleave(self.height).view(-1, *[1] * (score.ndim - 1))
        return rows.expand_as(score).clone()

    def violations(self, mask: Tensor) -> int:
        blocks = mask.reshape(mask.shape[0] // self.height, -1)
        return int((blocks.any(1) != blocks.all(1)).sum())


HALF = BlockRows(0.5)


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5), nn.Linear(5, 3)).eval()


IMAGES = torch.randn(48, 2, 4, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("mask", ["magnitude", "random", "wanda", "alps", "woodfisher"])
@pytest.mark.parametrize("solver", ["newton", None])
def test_a_network_is_pruned_to_it(mask: str, solver: Any) -> None:
    model = network()
    recipe = snows.Recipe(horizon=3, sweeps=2, mask_steps=2)
    options: dict[str, Any] = {"mask": mask, "solver": solver, "recipe": recipe, "layers": "0, 3", "progress": False}
    with pytest.warns(SnowsWarning, match="the mask of 0 removes every weight of 4 of its 8 outputs"):
        result = snows.prune(model, IMAGES, HALF, **options)
    (pruned,) = result.report.layers
    assert (pruned.name, pruned.pattern, pruned.kept) == ("0", "0.5 in blocks of 2 rows", 72)
    assert next(dense.reason for dense in result.report.dense_layers) == "its 5 outputs are no multiple of 2"
    kept = result.masks["0.weight"]
    assert HALF.violations(kept) == 0
    weight = result.model.state_dict()["0.weight"]
    assert not weight[~kept].any()
    if solver is not None:
        assert not torch.equal(weight[kept], model.state_dict()["0.weight"][kept])


@pytest.mark.parametrize("mask", ["obc", "sparsegpt", "exchange", "cap", "chita"])
def test_methods_that_remove_single_weights_refuse_it_and_name_those_that_do_not(mask: str) -> None:
    with pytest.raises(
        ArgumentError, match=r"has no form for the pattern 0\.5 in blocks of 2 rows of 0\.weight"
    ) as caught:
        snows.prune(network(), IMAGES, HALF, mask=mask, layers="0", progress=False)
    assert "expected one of 'magnitude', 'random', 'woodfisher', 'wanda', 'alps'" in str(caught.value)


def test_what_it_gets_for_nothing() -> None:
    assert BlockRows.parse("0.5") is None
    assert HALF.on_the_way(0.3) is HALF
    assert HALF.bounds(18) == (9, 9)
    assert HALF.group is None
    assert not HALF.is_unstructured
    assert HALF.budget is None
    assert not HALF.ranked_together
    score = torch.rand(6, 3)
    assert torch.equal(HALF.best_mask_by_row(score), HALF.best_mask(score))
    masks = HALF.best_masks({"a": score, "b": 100 * score})
    assert torch.equal(masks["a"], masks["b"])
    with pytest.raises(NotImplementedError, match="BlockRows has a budget, but does not define with_budget"):
        HALF.with_budget(Budget(0.5))


def test_complaints_are_of_counts_and_of_violations() -> None:
    exact = torch.tensor([[True, True], [True, True], [False, False], [False, False]])
    assert HALF.complaint({"a": exact}) is None
    assert HALF.complaint({"a": exact, "b": ~exact}) is None
    few = exact.clone()
    few[0, 0] = False
    assert HALF.complaint({"a": exact, "b": few}) == "it removes 5 of b; expected 4 (True means kept)"
    wrong = exact.flip(1).roll(1, 0)
    assert HALF.violations(wrong) == 2
    assert HALF.complaint({"b": wrong}) == (
        "the mask of b breaks the pattern 0.5 in blocks of 2 rows in 2 places (True means kept)"
    )


def test_it_stands_beside_the_other_kinds() -> None:
    patterns: dict[str, Pattern] = {"a": HALF, "b": NM(1, 2), "c": Unstructured(0.5)}
    shapes = {"a": (4, 6), "b": (4, 6), "c": (3, 7)}
    fake = FakeNetwork(shapes, patterns)
    spread = spread_out(patterns, fake, "uniform", ranks_together=False)  # type: ignore[arg-type]  # nothing measured
    assert spread["a"] is HALF
    assert spread["b"] == NM(1, 2)
    masks = Magnitude().choose(fake).masks
    assert list(masks) == ["a", "b", "c"]
    assert all(patterns[name].complaint({name: mask}) is None for name, mask in masks.items())


@pytest.mark.parametrize("method", [Wanda(), ALPS(steps=20)], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("name", ["convolution", "grouped", "one dimension"])
def test_layer_methods_that_score_take_any_kind(method: Any, name: str) -> None:
    weight, gram = layer(name)
    pattern = BlockRows(0.5, height=1)
    mask = method.choose_layer("w", weight, gram, pattern).masks["w"]
    assert pattern.violations(mask) == 0
    assert int((~mask).sum()) == round(0.5 * len(weight)) * math.prod(weight.shape[1:])


@pytest.mark.parametrize("method", [OBC(), SparseGPT(), Exchange()], ids=lambda m: type(m).__name__)
def test_layer_methods_that_remove_weights_refuse_before_they_begin(method: Any) -> None:
    weight, gram = layer("linear")
    with pytest.raises(ArgumentError, match=r"has no form for the pattern 0\.5 in blocks of 2 rows of w"):
        method.choose_layer("w", weight, gram * math.nan, HALF)


@pytest.mark.parametrize("method", [CAP(), CBS(), FALCON(), FALCON(flops=0.5)], ids=repr)
def test_so_do_network_methods(method: Any) -> None:
    with pytest.raises(ArgumentError, match=r"has no form for the pattern 0\.5 in blocks of 2 rows of a"):
        method.choose(FakeNetwork({"a": (4, 4)}, HALF))
