"""Settings: a recipe resolved for one network, device and pattern. Nothing is left open in them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..devices.weights import rest
from ..errors import ArgumentError, SnowsWarning
from ..graph import Graph
from ..graph.kind import NetworkKind, kind_of
from ..patterns import PatternRules
from ..recipe import Effort, Recipe
from .cg import CGOptions
from .newton import NewtonOptions
from .objective import CurvatureKind, Normalization

ALL_SAMPLES = 1 << 62  # more than any run has


@dataclass(frozen=True)
class _LastStage:
    """Steps of the last stage for each effort, and its rate. "default" takes half a minute on a large GPU."""

    steps: dict[Effort, int]
    rate: float

    def choices(self, effort: Effort, device: str, wanted: bool) -> dict[str, Any]:
        steps = self.steps[effort] // (_CPU_SHARE_OF_STEPS if device == "cpu" else 1) if wanted else 0
        return {"finish_steps": steps, "finish_rate": self.rate}


_TRANSFORMER_DISTILL = _LastStage({"fast": 600, "default": 1500, "best": 5000}, rate=1e-3)
_CONVOLUTIONAL_DISTILL = _LastStage({"fast": 0, "default": 1000, "best": 3000}, rate=3e-4)
_CPU_SHARE_OF_STEPS = 10  # a tenth of the steps is most of the gain


@dataclass(frozen=True)
class StartSettings:
    """Where a solve starts. `closed_form`: at the least-squares weights (K=0), if these have a lower loss."""

    closed_form: bool
    ridge: float


@dataclass(frozen=True)
class CurvatureSettings:
    """Of curvature products. "exact" is Gauss-Newton where that equals the Hessian, and the Hessian elsewhere."""

    kind: CurvatureKind | Literal["exact"]
    samples: int  # in one product, at most
    preconditioned: bool
    half_precision: bool  # derivatives in bfloat16, if every operation of the segment is piecewise linear


@dataclass(frozen=True)
class DistillSettings:
    """The last stage. There is none if it has no steps."""

    steps: int
    batch: int
    rate: float
    half_precision: bool


@dataclass(frozen=True)
class Settings:
    """All choices of a run. The fields mean what they mean in a `Recipe`."""

    horizon: int
    sweeps: int
    mask_steps: int
    targets: Literal["dense-stream", "dense-weights"]
    normalization: Normalization
    minibatch: int  # ALL_SAMPLES: gradient and line search take all samples
    mirror: bool
    start: StartSettings
    curvature: CurvatureSettings
    newton: NewtonOptions
    distill: DistillSettings

    @property
    def in_minibatches(self) -> bool:
        return self.minibatch < ALL_SAMPLES


def resolve(recipe: Recipe, graph: Graph, device: str = "cpu", rules: PatternRules | None = None) -> Settings:
    """The settings that a recipe means for this network. `device` is a type of device: "cpu", "cuda" …"""
    kind = kind_of(graph)
    by_word = {"auto": own_choices(kind, device, rules, recipe.effort), "paper": paper_choices(kind)}
    open_choices = {f.name: word for f in fields(recipe) if (word := getattr(recipe, f.name)) in ("auto", "paper")}
    chosen: Any = recipe.replace(**{n: by_word[w][n] for n, w in open_choices.items() if n in by_word[w]})
    if chosen.finish_steps and rest(graph.parameters):
        chosen = _without_last_stage(chosen, "finish_steps" in open_choices)
    steps = chosen.sweeps if chosen.mask_steps == "auto" else chosen.mask_steps
    if steps > chosen.sweeps:
        raise ArgumentError(
            f"recipe: mask_steps is {steps}, sweeps {chosen.sweeps}; each step takes one sweep, so "
            "expected at least as many sweeps"
        )
    cg = CGOptions(chosen.cg_steps, chosen.cg_absolute_tolerance, chosen.cg_relative_tolerance, chosen.cg_least_gain)
    half_precision = chosen.precision == "auto" and device == "cuda"
    return Settings(
        horizon=chosen.horizon,
        sweeps=chosen.sweeps,
        mask_steps=steps,
        targets=chosen.targets,
        normalization=chosen.normalization,
        minibatch=chosen.minibatch or ALL_SAMPLES,
        mirror=chosen.mirror,
        start=StartSettings(chosen.start == "closed-form", chosen.ridge),
        curvature=CurvatureSettings(
            kind="exact" if chosen.curvature == "auto" else chosen.curvature,
            samples=chosen.product_samples or ALL_SAMPLES,
            preconditioned=chosen.preconditioner is not None,
            half_precision=half_precision,
        ),
        newton=NewtonOptions(chosen.newton_steps, cg, chosen.damping, chosen.relative_damping, chosen.armijo),
        distill=DistillSettings(chosen.finish_steps, chosen.finish_batch, chosen.finish_rate, half_precision),
    )


def _without_last_stage(chosen: Any, is_default: bool) -> Any:
    """The choices without a last stage, which trains all weights together."""
    reason = "the last stage needs all weights on the device at once, and they do not fit the memory of this run"
    if not is_default:
        raise ArgumentError(f"recipe: finish_steps is {chosen.finish_steps}, but {reason}; give more of it, or 0 steps")
    warnings.warn(f"there is no last stage: {reason}", SnowsWarning, stacklevel=3)
    return chosen.replace(finish_steps=0)


def own_choices(
    kind: NetworkKind, device: str, rules: PatternRules | None, effort: Effort = "default"
) -> dict[str, Any]:
    """What "auto" means: the best that its cost is worth on held-out calibration data (docs/appendix/method.md)."""
    if kind.attention:
        last = _TRANSFORMER_DISTILL.choices(effort, device, wanted=kind.images)
        return {"horizon": 0, "sweeps": 1, "mask_steps": 1, "targets": "dense-weights", "mirror": False, **last}
    last = _CONVOLUTIONAL_DISTILL.choices(effort, device, wanted=kind.large_inputs)
    if effort == "fast":  # a short cascade, or where images are large the closed form alone
        passes = {"horizon": 0, "sweeps": 1} if kind.large_inputs else {"horizon": 6, "sweeps": 2}
        mirror = kind.images and kind.large_inputs
        return {**passes, "mask_steps": 1, "targets": "dense-stream", "mirror": mirror, **last}
    choices = {"horizon": 4 if kind.large_inputs else 16, "sweeps": 3, "targets": "dense-stream", "mirror": False}
    choices |= last
    in_groups = rules is not None and any(p is not None and p.group is not None for _, p in rules.rules)
    return {**choices, "mask_steps": 1} if kind.large_inputs and in_groups else choices


def paper_choices(kind: NetworkKind) -> dict[str, Any]:
    """What "paper" means: its hyperparameter table, by architecture family."""
    if kind.attention:
        return {"horizon": 3, "cg_absolute_tolerance": 5e-4}  # ViT-B/16
    if kind.grouped:
        horizon = 60  # MobileNet
    elif kind.large_inputs:
        horizon = 30  # ResNet50, ImageNet
    else:
        horizon = 40 if kind.layers < 40 else 100  # ResNet20, CIFAR-10; ResNet50, CIFAR-100
    return {"horizon": horizon, "cg_absolute_tolerance": 1e-3}
