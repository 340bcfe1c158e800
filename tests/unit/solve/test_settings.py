"""A recipe becomes settings: what "auto" and "paper" mean for each kind of network, and where each choice goes."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from snows.errors import ArgumentError
from snows.graph import Graph, capture
from snows.graph.kind import NetworkKind, kind_of
from snows.patterns import PatternRules
from snows.recipe import DEFAULT, EFFORTS, FAST, PAPER, Recipe, as_recipe
from snows.solve.cg import CGOptions
from snows.solve.newton import NewtonOptions
from snows.solve.settings import (
    ALL_SAMPLES,
    CurvatureSettings,
    DistillSettings,
    StartSettings,
    own_choices,
    paper_choices,
    resolve,
)
from tests.networks import captured
from tests.transformers import Vision, build
from tests.transformers import images as pictures


def chain(layers: int, width: int = 4) -> Graph:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).eval()
    return capture(model, (torch.randn(2, width),), {})


@cache
def images(height: int, width: int, dtype: torch.dtype = torch.float32) -> Graph:
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)).to(dtype).eval()
    return capture(model, (torch.randn(2, 3, height, width, dtype=dtype),), {})


@cache
def vision_transformer(side: int) -> Graph:
    return capture(build(Vision, height=side, width=side), (pictures(2, side, side),), {})


def own(graph: Graph, device: str = "cpu", pattern: str | None = None) -> dict[str, Any]:
    return own_choices(kind_of(graph), device, None if pattern is None else PatternRules.parse(pattern))


def paper(graph: Graph) -> dict[str, Any]:
    return paper_choices(kind_of(graph))


def resolved(graph: Graph, effort: str, device: str = "cpu") -> tuple[int, int, int, int]:
    """Horizon, sweeps, CG steps and steps of the last stage."""
    found = resolve(as_recipe(None, effort), graph, device)
    return found.horizon, found.sweeps, found.newton.cg.max_steps, found.distill.steps


def test_more_effort_takes_more_steps() -> None:
    small, large, transformer = images(32, 32), images(224, 224), vision_transformer(64)
    assert [resolved(small, e) for e in EFFORTS] == [(6, 2, 3, 0), (16, 3, 20, 0), (16, 3, 20, 0)]
    assert [resolved(large, e) for e in EFFORTS] == [(0, 1, 3, 0), (4, 3, 20, 100), (4, 3, 20, 300)]
    assert [resolved(large, e, "cuda") for e in EFFORTS] == [(0, 1, 3, 0), (4, 3, 20, 1000), (4, 3, 20, 3000)]
    assert [resolved(transformer, e) for e in EFFORTS] == [(0, 1, 3, 60), (0, 1, 20, 150), (0, 1, 20, 500)]


def test_few_large_images_are_mirrored() -> None:
    """Not small ones, which may be digits, nor those of transformers, whose last stage sees random views."""
    small, large, transformer = images(32, 32), images(224, 224), vision_transformer(128)
    assert [resolve(as_recipe(None, effort), large).mirror for effort in EFFORTS] == [True, False, False]
    assert not any(resolve(recipe, graph).mirror for graph in (small, transformer) for recipe in (FAST, DEFAULT))
    assert not resolve(FAST.replace(mirror=False), large).mirror
    assert resolve(DEFAULT.replace(mirror=True), small).mirror
    assert [recipe.may_mirror for recipe in (FAST, DEFAULT, PAPER, FAST.replace(mirror=False))] == [True] + 3 * [False]


# What the words mean


def test_horizons_by_kind_of_network() -> None:
    assert paper(captured("attention")[1])["horizon"] == 3
    assert paper(captured("attention")[1])["cg_absolute_tolerance"] == 5e-4
    assert resolve(PAPER, captured("mlp")[1]).newton.cg.absolute_tolerance == 1e-3
    assert own(captured("attention")[1])["horizon"] == 0
    for name in ("grouped", "depthwise"):
        assert paper(captured(name)[1])["horizon"] == 60
    for name in ("mlp", "conv-bn", "residual"):
        assert paper(captured(name)[1])["horizon"] == 40
    for name in ("mlp", "conv-bn", "residual", "depthwise"):
        assert own(captured(name)[1])["horizon"] == 16


def test_horizons_by_depth_and_image_size() -> None:
    assert [paper(chain(layers))["horizon"] for layers in (39, 40)] == [40, 100]
    small, large = images(127, 128), images(128, 128)
    assert [paper(graph)["horizon"] for graph in (small, large)] == [40, 30]
    assert [own(graph)["horizon"] for graph in (small, large)] == [16, 4]


def test_targets_and_sweeps_by_kind_of_network() -> None:
    transformer, other = resolve(DEFAULT, captured("attention")[1]), resolve(DEFAULT, captured("mlp")[1])
    assert (transformer.targets, transformer.sweeps) == ("dense-weights", 1)
    assert (other.targets, other.sweeps) == ("dense-stream", 3)


def test_mask_steps_take_sweeps() -> None:
    graph = captured("mlp")[1]
    for sweeps, steps in (("auto", 3), (1, 1), (2, 2), (5, 5)):
        assert resolve(Recipe(sweeps=sweeps), graph).mask_steps == steps
    assert resolve(Recipe(mask_steps=3), graph).mask_steps == 3
    assert resolve(Recipe(), captured("attention")[1]).mask_steps == 1


def test_more_mask_steps_than_sweeps_are_refused() -> None:
    assert resolve(Recipe(sweeps=2, mask_steps=2), captured("mlp")[1]).mask_steps == 2
    with pytest.raises(ArgumentError, match=r"^recipe: mask_steps is 3, sweeps 2; .* expected at least as many"):
        resolve(Recipe(sweeps=2, mask_steps=3), captured("mlp")[1])


def test_groups_of_large_images_take_one_step() -> None:
    for pattern, of_small, of_large in (("2:4", 3, 1), ("0.7", 3, 3), ("0.7, head=2:4", 3, 1), ("dense", 3, 3)):
        rules = PatternRules.parse(pattern)
        steps = [resolve(Recipe(), images(side, side), rules=rules).mask_steps for side in (32, 128)]
        assert steps == [of_small, of_large]
    assert resolve(Recipe(mask_steps=2), images(128, 128), rules=PatternRules.parse("2:4")).mask_steps == 2
    assert resolve(Recipe(), images(128, 128)).mask_steps == 3


@pytest.mark.parametrize(
    ("graph", "device", "steps", "rate"),
    [
        (lambda: vision_transformer(32), "cuda", 1500, 1e-3),
        (lambda: vision_transformer(32), "cpu", 150, 1e-3),
        (lambda: vision_transformer(8), "cuda", 0, 1e-3),
        (lambda: images(128, 128), "cuda", 1000, 3e-4),
        (lambda: images(128, 128), "cpu", 100, 3e-4),
        (lambda: images(32, 32), "cuda", 0, 3e-4),
    ],
)
def test_the_last_stage_is_for_transformers_and_convolutions_of_large_images(
    graph: Any, device: str, steps: int, rate: float
) -> None:
    settings = resolve(DEFAULT, graph(), device)
    assert (settings.distill.steps, settings.distill.rate) == (steps, rate)
    chosen = resolve(DEFAULT.replace(finish_steps=7, finish_rate=0.5), graph(), device)
    assert (chosen.distill.steps, chosen.distill.rate) == (7, 0.5)
    assert resolve(PAPER, graph(), device).distill.steps == 0


# The same settings for the same network


@pytest.mark.parametrize("side", [112, 128])
@pytest.mark.parametrize("recipe", [DEFAULT, PAPER], ids=["default", "paper"])
def test_settings_do_not_depend_on_the_dtype(side: int, recipe: Recipe) -> None:
    """In bytes, 112 pixels in float64 are more than 128 pixels in float32."""
    of_single, of_double = (
        resolve(recipe, images(side, side, dtype), rules=PatternRules.parse("2:4"))
        for dtype in (torch.float32, torch.float64)
    )
    assert of_single == of_double


def test_the_kind_of_a_network() -> None:
    assert kind_of(images(112, 112)) == NetworkKind(False, True, False, False, 1)
    assert kind_of(images(128, 128)) == NetworkKind(False, True, True, False, 1)
    assert kind_of(vision_transformer(32)).attention
    assert kind_of(captured("mlp")[1]) == NetworkKind(False, False, False, False, 3)
    assert kind_of(captured("grouped")[1]).grouped


# Where each choice goes


def test_every_choice_of_a_recipe_reaches_the_settings() -> None:
    recipe = Recipe(
        horizon=5, sweeps=4, mask_steps=2, targets="dense-weights", normalization="mean", curvature="hessian",
        start="masked", preconditioner=None, ridge=0.25, newton_steps=7, cg_steps=8, cg_absolute_tolerance=0.5,
        cg_relative_tolerance=0.125, cg_least_gain=0.0625, damping=3.0, relative_damping=2.0, armijo=0.75,
        product_samples=11, minibatch=12, finish_steps=13, finish_batch=14, finish_rate=15.0,
    )  # fmt: skip
    settings = resolve(recipe, captured("mlp")[1])
    assert (settings.horizon, settings.sweeps, settings.mask_steps) == (5, 4, 2)
    assert (settings.targets, settings.normalization) == ("dense-weights", "mean")
    assert (settings.minibatch, settings.in_minibatches) == (12, True)
    assert settings.start == StartSettings(closed_form=False, ridge=0.25)
    assert settings.curvature == CurvatureSettings("hessian", samples=11, preconditioned=False, half_precision=False)
    cg = CGOptions(max_steps=8, absolute_tolerance=0.5, relative_tolerance=0.125, least_gain=0.0625)
    assert settings.newton == NewtonOptions(steps=7, cg=cg, damping=3.0, relative_damping=2.0, armijo=0.75)
    assert settings.distill == DistillSettings(steps=13, batch=14, rate=15.0, half_precision=False)


def test_the_default_and_the_paper_differ_in_their_kind_of_solve() -> None:
    graph = captured("mlp")[1]
    default, as_written = resolve(DEFAULT, graph), resolve(PAPER, graph)
    assert default.start == StartSettings(closed_form=True, ridge=1e-6)
    assert default.curvature == CurvatureSettings("gauss-newton", 1000, preconditioned=True, half_precision=False)
    assert not default.in_minibatches
    assert not as_written.start.closed_form
    assert as_written.curvature == CurvatureSettings("exact", ALL_SAMPLES, preconditioned=False, half_precision=False)
    assert as_written.in_minibatches
    assert as_written.minibatch == 256


@pytest.mark.parametrize(
    ("precision", "device", "halved"),
    [("auto", "cuda", True), ("auto", "cpu", False), ("auto", "xpu", False), ("full", "cuda", False)],
)
def test_half_precision_is_for_gpus(precision: Any, device: str, halved: bool) -> None:
    settings = resolve(DEFAULT.replace(precision=precision), captured("mlp")[1], device)
    assert settings.curvature.half_precision is halved
    assert settings.distill.half_precision is halved


@pytest.mark.parametrize("name", ["mlp", "attention", "depthwise"])
@pytest.mark.parametrize("recipe", [DEFAULT, PAPER, Recipe(horizon="paper", cg_absolute_tolerance="paper")])
def test_nothing_is_left_open(name: str, recipe: Recipe) -> None:
    def values(data: dict[str, Any]) -> list[Any]:
        return [v for value in data.values() for v in (values(value) if isinstance(value, dict) else [value])]

    found = values(asdict(resolve(recipe, captured(name)[1])))
    assert not [value for value in found if value in ("auto", "paper", None)]
