"""The plan of a run: which layers are pruned, with which pattern and horizon, and why the others stay dense."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby

from torch import Tensor

from .data.layer_lists import SUFFIX, read_layer_list
from .errors import ArgumentError, InputError, SnowsWarning, a_type
from .events import LayerFacts
from .graph import Graph, Layer
from .patterns import Pattern, PatternRules

Names = str | Iterable[str] | None
ROLES = ("qkv", "out", "mlp")  # in a transformer


@dataclass(frozen=True)
class PlannedLayer:
    """A layer to be pruned. `pattern` is None if a given mask takes its place.

    `attention` is the name of the attention that query, key and value belong to; these three are solved together.
    """

    layer: Layer
    pattern: Pattern | None
    horizon: int
    attention: str | None = None

    @property
    def required_pattern(self) -> Pattern:
        """The pattern of a layer whose mask is still to be chosen."""
        if self.pattern is None:
            raise InputError(f"{self.layer.name} has a given mask, and no pattern by which to choose another one")
        return self.pattern


@dataclass(frozen=True)
class Plan:
    """Which layers are pruned, in order of execution (query, key and value of one attention together)."""

    pruned: tuple[PlannedLayer, ...]
    dense: tuple[tuple[Layer, str], ...]  # each with the reason

    def require_layers(self) -> None:
        """Raise InputError if no layer is pruned."""
        if not self.pruned:
            reasons = [f"{layer.name}: {reason}" for layer, reason in self.dense]
            more = f"; and {len(reasons) - 8} more" if len(reasons) > 8 else ""
            raise InputError(f"no layer can be pruned: {'; '.join(reasons[:8]) or 'the model has no layers'}{more}")

    @property
    def groups(self) -> list[tuple[PlannedLayer, ...]]:
        """The layers that are solved together: query, key and value of one attention; every other layer alone."""
        return [tuple(members) for _, members in groupby(self.pruned, lambda p: p.attention or p.layer.parameter)]

    def facts(self, flops: Mapping[str, int], readjusts: bool) -> tuple[LayerFacts, ...]:
        """What a report says of each layer. `flops` are by parameter name."""
        together = {p.layer.name: tuple(other.layer.name for other in group) for group in self.groups for p in group}
        return tuple(
            LayerFacts(
                name=p.layer.name,
                parameter=p.layer.parameter,
                shape=tuple(p.layer.shape),
                pattern="given" if p.pattern is None else str(p.pattern),
                horizon=p.horizon if readjusts else None,
                group=together[p.layer.name],
                flops=flops[p.layer.parameter],
            )
            for p in self.pruned
        )

    def with_patterns(self, patterns: Mapping[str, Pattern]) -> Plan:
        """The plan with other patterns, by parameter name."""
        pruned = tuple(replace(p, pattern=patterns.get(p.layer.parameter, p.pattern)) for p in self.pruned)
        return replace(self, pruned=pruned)

    def on_the_way(self, share: float) -> Plan:
        """The plan after this share of the way from dense to every layer's pattern."""
        return self.with_patterns({name: pattern.on_the_way(share) for name, pattern in self.patterns.items()})

    @property
    def patterns(self) -> dict[str, Pattern]:
        """The patterns by parameter name."""
        return {p.layer.parameter: p.pattern for p in self.pruned if p.pattern is not None}


def make_plan(
    graph: Graph,
    patterns: PatternRules | None,
    horizon: int,
    layers: Names = None,
    exclude: Names = None,
    masks: Mapping[str, Tensor] | None = None,
) -> Plan:
    """Decide for every layer of the graph whether it is pruned, and how. Given `masks` decide which layers are."""
    wanted, unwanted = as_names(layers, "layers") or (), as_names(exclude, "exclude") or ()
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
        if masks is not None:
            pattern = _kept_by(masks[layer.parameter], pattern, layer)
        pruned.append(PlannedLayer(layer, pattern, min(horizon, len(graph.operations_after(layer)) - 1)))
    return Plan(_grouped(graph, pruned), tuple(dense))


def _grouped(graph: Graph, pruned: list[PlannedLayer]) -> tuple[PlannedLayer, ...]:
    """In order of execution, except that query, key and value of one attention follow each other, in this order."""
    order: dict[str, tuple[int, int, int]] = {}
    begins: dict[str, int] = {}  # the first layer of each attention
    named = []
    for planned in sorted(pruned, key=lambda p: p.layer.position):
        position, begin, place = planned.layer.position, planned.layer.position, 0
        fed = graph.attention_fed_by(planned.layer)
        if fed is not None:
            attention, place = fed[0].name, fed[1]
            begin = begins.setdefault(attention, position)
            planned = replace(planned, attention=attention)
        order[planned.layer.parameter] = (begin, place, position)
        named.append(planned)
    return tuple(sorted(named, key=lambda p: order[p.layer.parameter]))


def _kept_by(mask: Tensor, pattern: Pattern | None, layer: Layer) -> Pattern | None:
    """The pattern, if the given mask keeps it. Budgets of several layers say nothing about a given mask."""
    if pattern is None or pattern.budget is not None:
        return None
    problem = pattern.refusal(layer.shape)
    if problem is None and (wrong := pattern.violations(mask)):
        problem = f"the given mask breaks it in {wrong} places"
    if problem is None:
        return pattern
    warnings.warn(f"{layer.name} is not {pattern}: {problem}; the mask is used unchanged", SnowsWarning, stacklevel=3)
    return None


def role(graph: Graph, layer: Layer) -> str | None:
    """A layer's role in a transformer: "qkv" (query, key, value), "out" (right after an attention) or "mlp".

    None outside of transformer blocks: patch embeddings, the head, convolutions.
    """
    if layer.refusal is not None or layer.is_convolution:
        return None
    if graph.attention_fed_by(layer) is not None:
        return "qkv"
    if graph.follows_attention(layer):
        return "out"
    return "mlp" if graph.has_attention_before(layer) and graph.layer_descendants(layer) else None


def as_names(given: Names, argument: str) -> tuple[str, ...] | None:
    """Names, globs and roles as a tuple. Sets are sorted, since they have no order. A file of `snows bench` is read."""
    if given is None:
        return None
    names: tuple[object, ...] = (given,)
    if isinstance(given, Set):
        names = tuple(sorted(given, key=str))  # sets have no order
    elif isinstance(given, Iterable) and not isinstance(given, str | Tensor):
        names = tuple(given)
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise ArgumentError(f"{argument} has {a_type(wrong[0])}; expected names or globs of layers")
    globs = tuple(part.strip() for name in names for part in str(name).split(",") if part.strip())
    if not globs:
        raise ArgumentError(f"{argument} is empty; expected names or globs of layers, or None for the default")
    lists = (read_layer_list(glob, argument) if glob.endswith(SUFFIX) else (glob,) for glob in globs)
    return tuple(name for listed in lists for name in listed)


def _matches(graph: Graph, layer: Layer, words: Iterable[str]) -> bool:
    """Whether one of the words is the layer's name, a glob that matches it, or its role."""
    return any(
        fnmatchcase(layer.name, word)
        or fnmatchcase(layer.parameter, word)
        or (word in ROLES and role(graph, layer) == word)
        for word in words
    )


def _check_globs(
    graph: Graph, wanted: tuple[str, ...], unwanted: tuple[str, ...], patterns: PatternRules | None
) -> None:
    """Refuse names that match no layer; for `exclude` a warning is enough."""
    names = [layer.name for layer in graph.layers]
    hint = f"the layers are {', '.join(names[:12])}" + (f" and {len(names) - 12} more" if len(names) > 12 else "")

    def unmatched(globs: tuple[str, ...]) -> list[str]:
        return [glob for glob in globs if not any(_matches(graph, layer, [glob]) for layer in graph.layers)]

    for glob in unmatched(wanted):
        raise ArgumentError(f"layers={glob!r} fits no layer; {hint}")
    for glob in unmatched(unwanted):
        warnings.warn(f"exclude={glob!r} fits no layer; {hint}", SnowsWarning, stacklevel=4)
    for glob in patterns.unmatched(names) if patterns else []:
        raise ArgumentError(f"the pattern for {glob!r} fits no layer; {hint}")


def _left_out(
    graph: Graph, layer: Layer, wanted: tuple[str, ...], unwanted: tuple[str, ...], masks: Mapping[str, Tensor] | None
) -> str | None:
    """Why a layer that could be pruned is not; None if it is."""
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
