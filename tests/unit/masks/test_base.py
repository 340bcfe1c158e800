"""Names become methods, methods say what they take, and a method added from outside prunes a network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import snows
from snows.errors import ArgumentError, InputError
from snows.masks import Choice, LayerMethod, Network, NetworkMethod, as_method, best_masks, default_spread
from snows.masks.alps import ALPS
from snows.masks.base import require_pattern, takes_pattern
from snows.masks.cbs import CBS
from snows.masks.chita import CHITA
from snows.masks.exchange import Exchange
from snows.masks.falcon import FALCON
from snows.masks.magnitude import Magnitude
from snows.masks.obc import OBC
from snows.masks.random import Random
from snows.masks.sparsegpt import SparseGPT
from snows.masks.wanda import Wanda
from snows.patterns import NM, Pattern, Unstructured
from tests.masks import FakeNetwork, layer

# A method added from outside


@dataclass(frozen=True)
class LargestInputs:
    """Layer by layer: weights at the inputs with the largest second moments."""

    reads: str = "dense"

    def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Pattern) -> Choice:
        moments = gram.diagonal(dim1=1, dim2=2).repeat_interleave(len(weight) // len(gram), 0)
        return Choice({name: pattern.best_mask(moments.view_as(weight))})


@dataclass(frozen=True)
class Slopes:
    """All layers together: weights with the largest first-order effect on the loss."""

    count: int = 20

    def choose(self, network: Network) -> Choice:
        effects = {n: g.mean(0).view_as(network.weights[n]) for n, g in network.gradients(self.count)}
        scores = {name: (effect * network.weights[name]).abs() for name, effect in effects.items()}
        return Choice(best_masks(scores, network.patterns))


@pytest.mark.filterwarnings("ignore:the mask of 2 removes every weight:snows.SnowsWarning")  # of a dead ReLU
@pytest.mark.parametrize(("pattern", "removed"), [("2:4", 44), (0.25, 22), ("0.25 erk", 22)])
@pytest.mark.parametrize("method", [LargestInputs(), LargestInputs("pruned"), Slopes()], ids=repr)
def test_a_method_from_outside_prunes_a_network(method: Any, pattern: Any, removed: int) -> None:
    snows.check_mask_method(method)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        data = torch.randn(40, 6)
    result = snows.prune(model, data, pattern, mask=method, layers="2, 4", recipe="paper", progress=False)
    assert result.report.mask == repr(method)
    assert sum(int((~mask).sum()) for mask in result.masks.values()) == removed
    for name, mask in result.masks.items():
        assert not result.model.state_dict()[name][~mask].any()
    if isinstance(method, LargestInputs) and pattern == "2:4":  # the same inputs for every output
        assert all(torch.equal(row, mask[0]) for mask in result.masks.values() for row in mask)


def test_protocols_tell_methods_apart() -> None:
    assert isinstance(LargestInputs(), LayerMethod)
    assert not isinstance(LargestInputs(), NetworkMethod)
    assert isinstance(Slopes(), NetworkMethod)
    assert default_spread(LargestInputs()) == "uniform"
    assert default_spread(Slopes()) == "global"
    assert default_spread(Random()) == "uniform"


# Names and objects


def test_names_become_methods_and_methods_stay() -> None:
    assert as_method("obc") == OBC()
    assert as_method("wanda+exchange") == Exchange("wanda")
    method = Slopes(3)
    assert as_method(method) is method


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Wanda, r"^mask is the class Wanda; expected an instance: snows\.Wanda\(\), whose options are its arguments$"),
        (Magnitude, r"expected an instance: snows\.Magnitude\(\)"),
        (Slopes, r"^mask is the class Slopes; expected an instance: Slopes\(\)"),
        (dict, r"mask is the class dict"),
        (
            "magnitud",
            r"^mask 'magnitud' is not known; expected 'magnitude', 'random', .* 'exchange', a layer-wise one ",
        ),
        ("nothing+exchange", "mask 'nothing' is not known"),
        (3, r"^mask is an int; expected a name, \{name: bool tensor\} or a mask method$"),
        (None, "mask is a NoneType"),
    ],
)
def test_what_is_no_method_is_refused(given: object, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        as_method(given)


def test_a_class_in_place_of_a_method_is_refused_before_any_work() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    with pytest.raises(ArgumentError, match=r"mask is the class Wanda; expected an instance: snows\.Wanda\(\)"):
        snows.prune(model, torch.randn(20, 4), "2:4", mask=snows.Wanda, layers="0", progress=False)
    with pytest.raises(ArgumentError, match=r"mask is the class OBC"):
        Exchange(OBC)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"mask is the class OBC"):
        snows.check_mask_method(OBC)


# Patterns


def test_best_masks_are_by_pattern_and_keep_the_order_of_the_scores() -> None:
    draw = torch.Generator().manual_seed(0)
    scores = {n: (1 + torch.rand(4, 4, generator=draw)) * 10.0**-i for i, n in enumerate("dcba")}
    together, apart = Unstructured(0.5, "global", most=1.0), Unstructured(0.5, "uniform")
    patterns: dict[str, Pattern] = {"a": NM(1, 4), "b": together, "c": apart, "d": together, "e": NM(2, 4)}
    masks = best_masks(scores, patterns)
    assert list(masks) == ["d", "c", "b", "a"]
    assert int(masks["a"].sum()) == 4
    assert int(masks["c"].sum()) == 8
    assert masks["d"].all()  # every score is far above those of b
    assert not masks["b"].any()


def test_methods_take_patterns_by_what_they_do_with_single_weights() -> None:
    @dataclass(frozen=True)
    class Odd(Magnitude):
        takes: str = "any"

    n_of_m, free = NM(2, 4), Unstructured(0.5)
    for takes, expected in {"any": (True, True), "single weights": (True, True), "unstructured": (False, True)}.items():
        assert (takes_pattern(Odd(takes), n_of_m), takes_pattern(Odd(takes), free)) == expected
    assert takes_pattern(Slopes(), n_of_m)  # methods from outside need not say it
    require_pattern(Odd("unstructured"), {"a": free, "b": free})
    with pytest.raises(
        ArgumentError, match="Odd has no form for the pattern 2:4 of b; expected one of 'magnitude', 'ra"
    ):
        require_pattern(Odd("unstructured"), {"a": free, "b": n_of_m})


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
def test_methods_without_a_form_for_nm_name_those_that_have_one(method: Any) -> None:
    network = FakeNetwork({"a": (4, 4), "head.weight": (4, 8)}, {"a": Unstructured(0.5), "head.weight": NM(2, 4)})
    words = f"{type(method).__name__} has no form for the pattern 2:4 of head.weight; expected one of "
    with pytest.raises(ArgumentError, match=words) as caught:
        method.choose(network)
    for name in ("magnitude", "wanda", "sparsegpt", "obc", "alps", "exchange", "woodfisher", "cap"):
        assert repr(name) in str(caught.value)


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
