"""The plan of a run: which layers are pruned, with which pattern and horizon, and why the others stay dense."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import Tensor

from .errors import ArgumentError, InputError, SnowsWarning
from .graph import Graph, Layer
from .graph.operations import is_attention
from .patterns import Pattern, PatternRules
from .recipe import Recipe

Names = str | Iterable[str] | None


@dataclass(frozen=True)
class PlannedLayer:
    """A layer to be pruned. `pattern` is None where a given mask says what is kept."""

    layer: Layer
    pattern: Pattern | None
    horizon: int


@dataclass(frozen=True)
class Plan:
    pruned: tuple[PlannedLayer, ...]  # in order of execution
    dense: tuple[tuple[Layer, str], ...]  # each with the reason

    def require_layers(self) -> None:
        if not self.pruned:
            reasons = [f"{layer.name}: {reason}" for layer, reason in self.dense]
            more = f"; and {len(reasons) - 8} more" if len(reasons) > 8 else ""
            raise InputError(f"no layer can be pruned: {'; '.join(reasons[:8]) or 'the model has no layers'}{more}")

    def with_patterns(self, patterns: Mapping[str, Pattern]) -> Plan:
        pruned = tuple(replace(p, pattern=patterns.get(p.layer.parameter, p.pattern)) for p in self.pruned)
        return replace(self, pruned=pruned)

    @property
    def patterns(self) -> dict[str, Pattern]:
        return {p.layer.parameter: p.pattern for p in self.pruned if p.pattern is not None}


def make_plan(
    graph: Graph,
    patterns: PatternRules | None,
    horizon: int | str,
    layers: Names = None,
    exclude: Names = None,
    masks: Mapping[str, Tensor] | None = None,
) -> Plan:
    """Decide for every layer of the graph. `masks`, where given, say which layers are pruned."""
    assert isinstance(horizon, int)  # a recipe's, resolved
    wanted, unwanted = _globs(layers, "layers"), _globs(exclude, "exclude")
    _check_globs(graph, wanted, unwanted, patterns)
    pruned: list[PlannedLayer] = []
    dense: list[tuple[Layer, str]] = []
    for layer in graph.layers:
        pattern = patterns.of(layer.name) if patterns else None
        reason = layer.refusal or _left_out(graph, layer, wanted, unwanted, masks)
        if reason is None and masks is None:
            reason = "its pattern is 'dense'" if pattern is None else pattern.refusal(layer.shape)
        if reason is not None:
            dense.append((layer, reason))
            continue
        pruned.append(PlannedLayer(layer, pattern, min(horizon, len(graph.operations_after(layer)) - 1)))
    pruned.sort(key=lambda p: p.layer.position)
    return Plan(tuple(pruned), tuple(dense))


def resolve(recipe: Recipe, graph: Graph) -> Recipe:
    """The recipe with numbers for what depends on the kind of network."""
    if isinstance(recipe.horizon, str):
        by_kind = {"auto": default_horizon, "paper": paper_horizon}[recipe.horizon]
        recipe = recipe.replace(horizon=by_kind(graph))
    if isinstance(recipe.cg_absolute_tolerance, str):
        recipe = recipe.replace(cg_absolute_tolerance=paper_tolerance(graph))
    return recipe


def default_horizon(graph: Graph) -> int:
    """K by kind of network: as deep as still paid on held-out calibration data, for what a pass costs."""
    if _has_attention(graph):
        return 12
    return 4 if _takes_large_images(graph) else 16


def paper_horizon(graph: Graph) -> int:
    """K by architecture family, from the paper's hyperparameter table."""
    if _has_attention(graph):
        return 3  # ViT-B/16
    if any(layer.groups > 1 for layer in graph.layers):
        return 60  # MobileNet
    if _takes_large_images(graph):
        return 30  # ResNet50, ImageNet
    return 40 if len(graph.layers) < 40 else 100  # ResNet20, CIFAR-10; ResNet50, CIFAR-100


def paper_tolerance(graph: Graph) -> float:
    """Of CG, absolute, from the same table."""
    return 5e-4 if _has_attention(graph) else 1e-3


def _has_attention(graph: Graph) -> bool:
    return any(is_attention(node) for node in graph.operations)


def _takes_large_images(graph: Graph) -> bool:
    return any(node.meta["bytes"] >= 4 * 3 * 128 * 128 for node in graph.inputs)


def _globs(given: Names, argument: str) -> tuple[str, ...]:
    if given is None:
        return ()
    names = (given,) if isinstance(given, str) else tuple(given)
    globs = tuple(part.strip() for name in names for part in str(name).split(",") if part.strip())
    if not globs:
        raise ArgumentError(f"{argument} is empty; expected names or globs of layers, or nothing at all")
    return globs


def _matches(layer: Layer, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(layer.name, glob) or fnmatchcase(layer.parameter, glob) for glob in globs)


def _check_globs(
    graph: Graph, wanted: tuple[str, ...], unwanted: tuple[str, ...], patterns: PatternRules | None
) -> None:
    names = [layer.name for layer in graph.layers]
    hint = f"the layers are {', '.join(names[:12])}" + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    for glob in wanted:
        if not any(_matches(layer, [glob]) for layer in graph.layers):
            raise ArgumentError(f"layers={glob!r} fits no layer; {hint}")
    for glob in unwanted:
        if not any(_matches(layer, [glob]) for layer in graph.layers):
            warnings.warn(f"exclude={glob!r} fits no layer; {hint}", SnowsWarning, stacklevel=4)
    for glob in patterns.unmatched(names) if patterns else []:
        raise ArgumentError(f"the pattern for {glob!r} fits no layer; {hint}")


def _left_out(
    graph: Graph, layer: Layer, wanted: tuple[str, ...], unwanted: tuple[str, ...], masks: Mapping[str, Tensor] | None
) -> str | None:
    if _matches(layer, unwanted):
        return "excluded"
    if masks is not None and layer.parameter not in masks:
        return "not in the given mask"
    if wanted:
        return None if _matches(layer, wanted) else "not among the chosen layers"
    if masks is not None:
        return None
    if not graph.layer_ancestors(layer):
        return "first layer (name it in layers= to prune it)"
    if not graph.layer_descendants(layer):
        return "last layer (name it in layers= to prune it)"
    return None
