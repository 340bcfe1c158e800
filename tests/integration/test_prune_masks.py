"""Masks in small prunes: chosen by methods, in steps, given, and which layers get one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

import snows
from snows import ArgumentError, SnowsWarning
from snows.masks import Choice
from tests.networks import example, make
from tests.prunes import QUICK, SAMPLES, check, quick, weights


@pytest.mark.parametrize("mask", ["magnitude", "random", "wanda", snows.Magnitude(), snows.Wanda()])
@pytest.mark.parametrize("pattern", ["2:4", 0.5, snows.Unstructured(0.5, "uniform")])
def test_every_mask_method_with_every_kind_of_pattern(mask: Any, pattern: Any) -> None:
    result = quick("mlp", pattern, mask=mask, layers="2")
    check(result, make("mlp"))
    assert int(result.masks["2.weight"].sum()) == 32


@pytest.mark.parametrize(("solver", "reads"), [("newton", "dense"), (None, "refitted")])
def test_masks_are_chosen_from_dense_inputs_where_weights_are_readjusted(solver: str | None, reads: str) -> None:
    def weights(reads: Any) -> list[Tensor]:
        result = quick("residual", 0.6, mask=snows.OBC(reads=reads), solver=solver)
        return [result.model.get_parameter(name) for name in result.masks]

    found = {each: weights(each) for each in ("auto", "dense", "refitted")}
    same = {each: all(map(torch.equal, found["auto"], found[each])) for each in ("dense", "refitted")}
    assert same == {each: each == reads for each in same}


@dataclass(frozen=True)
class Watched:
    """Magnitude, with a note of what it was asked."""

    asked: list[tuple[float, float]] = field(default_factory=list)  # for which sparsity, and what is left before

    def masks(self, weights: Mapping[str, Tensor], patterns: Mapping[str, Any]) -> Choice:
        for name, weight in weights.items():
            self.asked.append((patterns[name].sparsity, float((weight != 0).float().mean())))
        return Choice({name: patterns[name].best_mask(weight.abs()) for name, weight in weights.items()})


class WatchedByLayer(Watched):
    def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Any) -> Choice:
        return self.masks({name: weight}, {name: pattern})


class WatchedTogether(Watched):
    def choose(self, network: Any) -> Choice:
        return self.masks(network.weights, network.patterns)


@pytest.mark.filterwarnings("ignore:the masks? of")  # all weights of one of few outputs may go
@pytest.mark.parametrize(
    ("pattern", "options", "expected"),
    [
        ("1:4", {"recipe": QUICK}, [(0.5, 1.0), (0.75, 0.5)]),
        ("2:4", {"recipe": QUICK}, [(0.5, 1.0)]),  # halfway lie 2.8 of 4
        ("2:4", {"recipe": QUICK.replace(sweeps=3)}, [(0.25, 1.0), (0.5, 0.75)]),
        (0.75, {"recipe": QUICK}, [(0.5, 1.0), (0.75, 0.5)]),
        ("1:4", {"recipe": QUICK.replace(sweeps=3)}, [(0.5, 1.0), (0.75, 0.5)]),
        (0.875, {"recipe": QUICK.replace(sweeps=3)}, [(0.5, 1.0), (0.75, 0.5), (0.875, 0.25)]),
        ("1:4", {"recipe": QUICK.replace(mask_steps=1)}, [(0.75, 1.0)]),
        ("1:4", {"recipe": QUICK.replace(sweeps=1)}, [(0.75, 1.0)]),
        ("1:4", {"recipe": QUICK, "solver": None}, [(0.75, 1.0)]),
    ],
)
@pytest.mark.parametrize("kind", [WatchedByLayer, WatchedTogether])
def test_masks_reach_the_pattern_in_steps(kind: type[Watched], pattern: Any, options: Any, expected: Any) -> None:
    """Each step chooses from the weights that the sweep before has re-adjusted."""
    method = kind()
    result = snows.prune(make("mlp"), example("mlp", 40), pattern, mask=method, progress=False, **options)
    assert method.asked == expected
    (mask,) = result.masks.values()
    assert int(mask.sum()) == round((1 - expected[-1][0]) * mask.numel())


def test_more_steps_than_sweeps_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"mask_steps is 3, sweeps 2; .* expected at least as many sweeps"):
        quick("mlp", "1:4", mask="wanda", recipe=QUICK.replace(mask_steps=3))


def test_given_masks_are_kept_as_they_are_and_other_layers_stay_dense() -> None:
    masks = {"2": torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.6}
    result = quick("mlp", mask=masks)
    check(result, make("mlp"))
    assert list(result.masks) == ["2.weight"]
    assert torch.equal(result.masks["2.weight"], masks["2"])
    by_parameter = quick("mlp", mask={"2.weight": masks["2"]})
    assert torch.equal(by_parameter.model.get_parameter("2.weight"), result.model.get_parameter("2.weight"))
    assert result.report.pattern == "given"


def test_the_zeros_of_the_weights_are_a_mask() -> None:
    model = make("mlp")
    model[2].weight[:, ::2] = 0
    with pytest.warns(SnowsWarning, match="the sparse network is its own reference"):
        result = snows.prune(model, example("mlp", SAMPLES), mask="weights", recipe=QUICK, progress=False)
    check(result, model)
    assert torch.equal(result.masks["2.weight"], model[2].weight != 0)


def test_torch_pruning_modules_are_read_as_masks_and_left_alone() -> None:
    model = make("mlp")
    torch_prune.l1_unstructured(model[2], "weight", 0.4)
    result = snows.prune(model, example("mlp", SAMPLES), recipe=QUICK, progress=False)
    assert torch.equal(result.masks["2.weight"], model[2].weight_mask.bool())
    assert not result.model[2].weight[~result.masks["2.weight"]].any()
    assert not hasattr(result.model[2], "weight_mask")
    assert hasattr(model[2], "weight_orig")
    assert torch_prune.is_pruned(model)


def test_torch_pruning_modules_of_a_model_that_can_still_be_trained() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    torch_prune.l1_unstructured(model[2], "weight", 0.4)
    result = snows.prune(model, torch.randn(SAMPLES, 4), recipe=QUICK, progress=False)
    assert torch.equal(result.masks["2.weight"], model[2].weight_mask.bool())


def test_patterns_layers_and_exclusions_by_name() -> None:
    pattern = {"*": "2:4", "shortcut.*": "dense", "last": "1:4"}
    result = quick("residual", pattern, layers=["conv*", "shortcut.0", "last"], exclude="conv2")
    assert {layer.name: layer.pattern for layer in result.report.layers} == {"conv1": "2:4", "last": "1:4"}
    reasons = {layer.name: layer.reason for layer in result.report.dense_layers}
    assert reasons == {
        "stem": "not among the chosen layers",
        "conv2": "excluded",
        "shortcut.0": "its pattern is 'dense'",
        "head": "not among the chosen layers",
    }
    check(result, make("residual"))


def test_first_and_last_layers_are_pruned_when_named() -> None:
    result = quick("mlp", 0.3, layers="*")
    assert [layer.name for layer in result.report.layers] == ["0", "2", "4"]
    check(result, make("mlp"))


def test_layers_that_do_not_fit_the_pattern_are_listed() -> None:
    result = quick("depthwise", "2:4")
    reasons = {layer.name: layer.reason for layer in result.report.dense_layers}
    assert reasons["2"] == "its 1 input channels per group are no multiple of 4"


# Given masks beside a pattern

TWO_OF_FOUR = torch.tensor([True, False, True, False]).repeat(16).view(8, 8)


@pytest.mark.parametrize("compact", [False, True])
def test_a_given_mask_that_breaks_the_pattern_is_reported_as_given(compact: bool, tmp_path: Path) -> None:
    """And what is saved agrees with its report."""
    mask = TWO_OF_FOUR.clone()
    mask[0, :4] = torch.tensor([True, True, True, False])
    with pytest.warns(SnowsWarning, match="^2 is not 2:4: the given mask breaks it in 1 places"):
        result = quick("mlp", "2:4", mask={"2": mask})
    (layer,) = result.report.layers
    assert (layer.pattern, layer.kept) == ("given", 33)
    assert torch.equal(result.masks["2.weight"], mask)
    assert any("is not 2:4" in warning for warning in result.report.warnings)
    snows.verify(result.save(tmp_path / "out", compact=compact))


@pytest.mark.parametrize("solver", ["newton", None])
def test_a_given_mask_that_keeps_the_pattern_is_reported_with_it(solver: str | None, tmp_path: Path) -> None:
    result = quick("mlp", "2:4", mask={"2": TWO_OF_FOUR}, solver=solver)
    (layer,) = result.report.layers
    assert (layer.pattern, layer.sparsity) == ("2:4", 0.5)
    assert [said for said in result.report.warnings if "calibration samples" not in said] == []
    snows.verify(result.save(tmp_path / "out"))


# Layers as any iterable


@pytest.mark.parametrize("argument", ["layers", "exclude"])
def test_names_of_layers_may_come_from_a_generator(argument: str) -> None:
    """Also where the network is planned twice, before and after its channels are permuted."""
    chosen, given = ["conv1", "conv2"], {"layers": ["conv1", "conv2"], "exclude": ["shortcut.0", "last"]}
    for permute in (False, True):
        names = (name for name in given[argument])
        result = quick("residual", "2:4", permute=permute, **{argument: names})
        assert [layer.name for layer in result.report.layers] == chosen


class Names(AbstractSet):
    """A set whose order is known; that of `set` depends on the hash seed of the process."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@pytest.mark.parametrize("argument", ["layers", "exclude"])
def test_a_run_with_a_set_of_layers_is_resumed_in_any_order(argument: str, tmp_path: Path) -> None:
    first, again, other = (
        quick("residual", "2:4", resume=folder, **{argument: Names(names)})
        for folder, names in (
            (tmp_path / "state", ["conv1", "last"]),
            (tmp_path / "state", ["last", "conv1"]),
            (tmp_path / "other", ["last", "conv1"]),
        )
    )
    assert again.report.recalled_solves == 2 * len(first.report.layers)
    assert torch.equal(weights(first), weights(again))
    assert torch.equal(weights(first), weights(other))
