"""Mask sources, one file each, behind two protocols. They know weights, statistics and patterns; no solver.

A *network* method sees all weights at once; a *layer* method sees one weight with the second moments of its inputs,
while the cascade passes the layer. Each gives masks (True = kept) and, where it changes them, weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..errors import ArgumentError
from ..patterns import Pattern


@dataclass(frozen=True)
class Choice:
    """Masks by parameter name, and new weights for those parameters that the method changed."""

    masks: dict[str, Tensor]
    weights: dict[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class NetworkMethod(Protocol):
    """Chooses all masks together, before the first layer is re-adjusted."""

    def choose(self, weights: Mapping[str, Tensor], patterns: Mapping[str, Pattern], seed: int) -> Choice: ...


@runtime_checkable
class LayerMethod(Protocol):
    """Chooses one layer's mask when the cascade arrives there.

    `weight` has the layer's own shape (outputs, inputs per group, *kernel); `gram` is groups x columns x columns with
    columns = inputs per group x kernel, the second moment of the layer's inputs in the pruned network.
    """

    def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Pattern) -> Choice: ...


MaskMethod = NetworkMethod | LayerMethod


def as_method(given: object) -> MaskMethod:
    """A method's name, or the method itself."""
    from .magnitude import Magnitude
    from .random import Random
    from .wanda import Wanda

    named: dict[str, type] = {"magnitude": Magnitude, "random": Random, "wanda": Wanda}
    if isinstance(given, str):
        if given not in named:
            known = ", ".join(repr(name) for name in named)
            raise ArgumentError(
                f"mask {given!r} is not known; expected {known}, 'weights' (the zeros of the given weights), "
                "{name: bool tensor} or a mask method"
            )
        method: MaskMethod = named[given]()
        return method
    if isinstance(given, NetworkMethod | LayerMethod):
        return given
    raise ArgumentError(f"mask is a {type(given).__name__}; expected a name, {{name: bool tensor}} or a mask method")


def spread_scores(scores: Mapping[str, Tensor], patterns: Mapping[str, Pattern], ranking: str) -> dict[str, Tensor]:
    """Best masks for scores: each layer for itself, or (unstructured patterns spread globally) layers ranked together.

    `ranking` is the method's own habit, for patterns that do not say how they are spread.
    """
    from ..patterns import Unstructured, keep_best

    masks: dict[str, Tensor] = {}
    together: dict[Pattern, dict[str, Tensor]] = {}
    for name, score in scores.items():
        pattern = patterns[name]
        if isinstance(pattern, Unstructured) and (pattern.spread or ranking) == "global":
            together.setdefault(pattern, {})[name] = score
        else:
            masks[name] = pattern.best_mask(score)
    for pattern, group in together.items():
        masks |= keep_best(group, pattern.sparsity, cap=True)
    return {name: masks[name] for name in scores}
