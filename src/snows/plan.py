"""The plan of a run: which layers are pruned, with which pattern and horizon, and why the others stay dense."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from torch import Tensor

from .errors import ArgumentError, InputError, SnowsWarning
from .graph import Graph, Layer
from .graph.kind import is_image
from .graph.operators import is_attention
from .patterns import NM, Pattern, PatternRules
from .recipe import Recipe

Names = str | Iterable[str] | None
# Of the last stage: half a minute for ViT-Ti and for ResNet50 on a large GPU. A tenth brings most of it on a CPU.
_FINISH_TRANSFORMERS: dict[str, Any] = {"finish_steps": 1500, "finish_rate": 1e-3}
_FINISH_CONVOLUTIONAL: dict[str, Any] = {"finish_steps": 1000, "finish_rate": 3e-4}
ROLES = ("qkv", "out", "mlp")  # in a transformer


@dataclass(frozen=True)
class PlannedLayer:
    """A layer to be pruned. `pattern` is None where a given mask says what is kept.

    Query, key and value that meet in one attention are solved together: `attention` is its name.
    """

    layer: Layer
    pattern: Pattern | None
    horizon: int
    attention: str | None = None


@dataclass(frozen=True)
class Plan:
    pruned: tuple[PlannedLayer, ...]  # in order of execution; those of one group one after another
    dense: tuple[tuple[Layer, str], ...]  # each with the reason

    def require_layers(self) -> None:
        if not self.pruned:
            reasons = [f"{layer.name}: {reason}" for layer, reason in self.dense]
            more = f"; and {len(reasons) - 8} more" if len(reasons) > 8 else ""
            raise InputError(f"no layer can be pruned: {'; '.join(reasons[:8]) or 'the model has no layers'}{more}")

    @property
    def groups(self) -> list[tuple[PlannedLayer, ...]]:
        """What is solved at a time: single layers, and those that meet in one attention."""
        return [tuple(members) for _, members in groupby(self.pruned, lambda p: p.attention or p.layer.parameter)]

    def with_patterns(self, patterns: Mapping[str, Pattern]) -> Plan:
        pruned = tuple(replace(p, pattern=patterns.get(p.layer.parameter, p.pattern)) for p in self.pruned)
        return replace(self, pruned=pruned)

    def on_the_way(self, share: float) -> Plan:
        """With each layer's pattern after this share of the way to it."""
        return self.with_patterns({name: pattern.on_the_way(share) for name, pattern in self.patterns.items()})

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
    return Plan(_grouped(graph, pruned), tuple(dense))


def _grouped(graph: Graph, pruned: list[PlannedLayer]) -> tuple[PlannedLayer, ...]:
    """In order of execution, with query, key and value of one attention, in this order, one after another."""
    fed = {p.layer.parameter: graph.attention_fed_by(p.layer) for p in pruned}
    begins: dict[str, int] = {}
    order: dict[str, tuple[int, int, int]] = {}
    for planned in sorted(pruned, key=lambda p: p.layer.position):
        attention = fed[planned.layer.parameter]
        position = planned.layer.position
        if attention is None:
            order[planned.layer.parameter] = (position, 0, position)
        else:
            first = begins.setdefault(attention[0].name, position)
            order[planned.layer.parameter] = (first, attention[1], position)
    named = [
        planned
        if (attention := fed[planned.layer.parameter]) is None
        else replace(planned, attention=attention[0].name)
        for planned in pruned
    ]
    return tuple(sorted(named, key=lambda p: order[p.layer.parameter]))


def resolve(recipe: Recipe, graph: Graph, device: str = "cpu", patterns: PatternRules | None = None) -> Recipe:
    """The recipe with values for what depends on the kind of network, of device and of pattern."""
    by_name = {"auto": own_choices(graph, device, patterns), "paper": paper_choices(graph)}
    named = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    known = {name: by_name[word].get(name) for name, word in named.items() if word in by_name}
    chosen = recipe.replace(**{name: value for name, value in known.items() if value is not None})
    assert isinstance(chosen.sweeps, int)
    steps = chosen.sweeps if chosen.mask_steps == "auto" else chosen.mask_steps  # one in every sweep
    if steps > chosen.sweeps:
        raise ArgumentError(
            f"recipe: mask_steps is {steps}, sweeps {chosen.sweeps}; each of these steps is a sweep of its own, so at "
            "least as many sweeps are expected"
        )
    return chosen.replace(mask_steps=steps)


def own_choices(graph: Graph, device: str = "cpu", patterns: PatternRules | None = None) -> dict[str, Any]:
    """By kind of network: what still paid on held-out calibration data, for what it costs (docs/method.md).

    Where nothing is said of `mask_steps`, each sweep is one.
    """
    if _has_attention(graph):
        pictures = any(is_image(node.meta.get("val")) for node in graph.inputs)
        last = _last_stage(_FINISH_TRANSFORMERS, pictures, device)
        return {"horizon": 0, "sweeps": 1, "mask_steps": 1, "targets": "dense-weights", **last}
    large = _takes_large_images(graph)
    last = _last_stage(_FINISH_CONVOLUTIONAL, large, device)
    choices = {"horizon": 4 if large else 16, "sweeps": 3, "targets": "dense-stream", **last}
    groups = patterns is not None and any(isinstance(pattern, NM) for _, pattern in patterns.rules)
    return {**choices, "mask_steps": 1} if large and groups else choices


def _last_stage(choices: dict[str, Any], wanted: bool, device: str) -> dict[str, Any]:
    steps = choices["finish_steps"] if wanted else 0
    return {**choices, "finish_steps": steps // 10 if device == "cpu" else steps}


def paper_choices(graph: Graph) -> dict[str, Any]:
    """By architecture family, from the paper's hyperparameter table."""
    if _has_attention(graph):
        return {"horizon": 3, "cg_absolute_tolerance": 5e-4}  # ViT-B/16
    if any(layer.groups > 1 for layer in graph.layers):
        horizon = 60  # MobileNet
    elif _takes_large_images(graph):
        horizon = 30  # ResNet50, ImageNet
    else:
        horizon = 40 if len(graph.layers) < 40 else 100  # ResNet20, CIFAR-10; ResNet50, CIFAR-100
    return {"horizon": horizon, "cg_absolute_tolerance": 1e-3}


def _has_attention(graph: Graph) -> bool:
    return any(is_attention(node) for node in graph.operations)


def _takes_large_images(graph: Graph) -> bool:
    return any(node.meta["bytes"] >= 4 * 3 * 128 * 128 for node in graph.inputs)


def role(graph: Graph, layer: Layer) -> str | None:
    """A layer's part in a transformer: "qkv" (query, key, value), "out" (right behind an attention) or "mlp".

    None for what is no part of a block: embeddings of patches, the head, convolutions.
    """
    if layer.refusal is not None or layer.is_convolution:
        return None
    if graph.attention_fed_by(layer) is not None:
        return "qkv"
    if graph.follows_attention(layer):
        return "out"
    return "mlp" if graph.has_attention_before(layer) and graph.layer_descendants(layer) else None


def _globs(given: Names, argument: str) -> tuple[str, ...]:
    if given is None:
        return ()
    names = (given,) if isinstance(given, str) else tuple(given)
    globs = tuple(part.strip() for name in names for part in str(name).split(",") if part.strip())
    if not globs:
        raise ArgumentError(f"{argument} is empty; expected names or globs of layers, or nothing at all")
    return globs


def _matches(graph: Graph, layer: Layer, words: Iterable[str]) -> bool:
    """Whether one of the words is the layer's name, a glob for it, or its role."""
    return any(
        fnmatchcase(layer.name, word)
        or fnmatchcase(layer.parameter, word)
        or (word in ROLES and role(graph, layer) == word)
        for word in words
    )


def _check_globs(
    graph: Graph, wanted: tuple[str, ...], unwanted: tuple[str, ...], patterns: PatternRules | None
) -> None:
    names = [layer.name for layer in graph.layers]
    hint = f"the layers are {', '.join(names[:12])}" + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    for glob in wanted:
        if not any(_matches(graph, layer, [glob]) for layer in graph.layers):
            raise ArgumentError(f"layers={glob!r} fits no layer; {hint}")
    for glob in unwanted:
        if not any(_matches(graph, layer, [glob]) for layer in graph.layers):
            warnings.warn(f"exclude={glob!r} fits no layer; {hint}", SnowsWarning, stacklevel=4)
    for glob in patterns.unmatched(names) if patterns else []:
        raise ArgumentError(f"the pattern for {glob!r} fits no layer; {hint}")


def _left_out(
    graph: Graph, layer: Layer, wanted: tuple[str, ...], unwanted: tuple[str, ...], masks: Mapping[str, Tensor] | None
) -> str | None:
    if _matches(graph, layer, unwanted):
        return "excluded"
    if masks is not None and layer.parameter not in masks:
        return "not in the given mask"
    if wanted:
        return None if _matches(graph, layer, wanted) else "not among the chosen layers"
    if masks is not None:
        return None
    if not graph.layer_ancestors(layer) and not graph.reads_table(layer):
        return "first layer (name it in layers= to prune it)"
    if not graph.layer_descendants(layer):
        return "last layer (name it in layers= to prune it)"
    return None
