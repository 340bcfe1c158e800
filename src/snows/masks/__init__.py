"""Mask sources, one file each, behind two protocols. They know weights, statistics and patterns; no solver.

A *network* method sees all weights at once, with gradients and a loss to ask for; a *layer* method sees one weight with
the second moments of its inputs, while the cascade passes the layer. Each gives masks (True = kept) and, where it
changes them, weights. Methods are frozen dataclasses; their fields are their options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from ..errors import ArgumentError
from ..patterns.base import NM, Pattern, keep_best

Reads = Literal["auto", "dense", "pruned", "refitted"]


@dataclass(frozen=True)
class Choice:
    """Masks by parameter name, and new weights for those parameters that the method changed."""

    masks: dict[str, Tensor]
    weights: dict[str, Tensor] = field(default_factory=dict)


class Network(Protocol):
    """What a network method may know: the weights to prune with their patterns, and how the network answers to them."""

    @property
    def weights(self) -> Mapping[str, Tensor]: ...
    @property
    def patterns(self) -> Mapping[str, Pattern]: ...
    @property
    def uses(self) -> Mapping[str, int]: ...  # how often each weight of a layer is used for one sample
    @property
    def seed(self) -> int: ...

    def gradients(self, count: int, batch: int = 1) -> Iterator[tuple[str, Tensor]]:
        """For each layer, `count` gradients of the loss as rows, each the mean over `batch` samples."""

    def loss(self, weights: Mapping[str, Tensor]) -> float:
        """The loss of the network with other weights, on the calibration samples."""


@runtime_checkable
class NetworkMethod(Protocol):
    """Chooses all masks together, before a sweep over the layers begins (see `mask_steps` of a recipe)."""

    def choose(self, network: Network) -> Choice: ...


@runtime_checkable
class LayerMethod(Protocol):
    """Chooses one layer's mask when the cascade arrives there.

    `weight` has the layer's own shape (outputs, inputs per group, *kernel); `gram` is groups x columns x columns with
    columns = inputs per group x kernel, the second moment of the layer's inputs. A method says which by an attribute
    `reads`: "pruned" (the default) are inputs as the network pruned so far gives them, "dense" are those of the dense
    network, "refitted" are pruned ones, with `weight` already refitted to them without a mask, and "auto" is "refitted"
    where the method's own weights stay, and "dense" where they are re-adjusted.
    """

    def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Pattern) -> Choice: ...


MaskMethod = NetworkMethod | LayerMethod

_NAMED = {
    "magnitude": "Magnitude",
    "random": "Random",
    "wanda": "Wanda",
    "sparsegpt": "SparseGPT",
    "obc": "OBC",
    "alps": "ALPS",
    "exchange": "Exchange",
    "woodfisher": "WoodFisher",
    "cbs": "CBS",
    "chita": "CHITA",
    "falcon": "FALCON",
    "cap": "CAP",
}
NAMES = tuple(_NAMED)


def as_method(given: object) -> MaskMethod:
    """A method's name, or the method itself; "obc+exchange" are exchanges that start from OBC's masks."""
    if isinstance(given, str):
        if given.endswith("+exchange"):
            from .exchange import Exchange

            return Exchange(given.removesuffix("+exchange"))
        if given not in _NAMED:
            raise ArgumentError(
                f"mask {given!r} is not known; expected {', '.join(map(repr, NAMES))}, a layer-wise one with "
                "'+exchange' behind it, 'weights' (the zeros of the given weights), {name: bool tensor}, a file of "
                "masks or a mask method"
            )
        method: MaskMethod = getattr(import_module(f".{given}", __name__), _NAMED[given])()
        return method
    if isinstance(given, NetworkMethod | LayerMethod):
        return given
    raise ArgumentError(f"mask is a {type(given).__name__}; expected a name, {{name: bool tensor}} or a mask method")


def default_spread(method: MaskMethod) -> Any:
    """How a method spreads a sparsity over layers unless told: its attribute `spread`, or by its kind."""
    return getattr(method, "spread", "global" if isinstance(method, NetworkMethod) else "uniform")


def best_masks(scores: Mapping[str, Tensor], patterns: Mapping[str, Pattern]) -> dict[str, Tensor]:
    """Best masks for scores: each layer for itself, or (patterns spread globally) layers ranked together."""
    masks: dict[str, Tensor] = {}
    together: dict[Pattern, dict[str, Tensor]] = {}
    for name, score in scores.items():
        pattern = patterns[name]
        if not isinstance(pattern, NM) and pattern.spread == "global":
            together.setdefault(pattern, {})[name] = score
        else:
            masks[name] = pattern.best_mask(score)
    for pattern, group in together.items():
        assert not isinstance(pattern, NM)
        bounds = {name: pattern.bounds(score.numel()) for name, score in group.items()}
        masks |= keep_best(group, pattern.sparsity, bounds)
    return {name: masks[name] for name in scores}


def require_unstructured(method: object, patterns: Mapping[str, Pattern]) -> None:
    """For methods that have no N:M form."""
    for name, pattern in patterns.items():
        if isinstance(pattern, NM):
            raise ArgumentError(
                f"{type(method).__name__} chooses unstructured masks only; {name} has the pattern {pattern}. "
                "For N:M take 'magnitude', 'wanda', 'sparsegpt', 'obc', 'alps', 'exchange', 'woodfisher' or 'cap'"
            )
