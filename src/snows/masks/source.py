"""Where the masks of a run come from: the caller, or a method that sees all layers together or one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ..data.moments import Moments
from ..data.preparation import Prepared
from ..devices.distributed.ranks import ALONE, Ranks, sharing
from ..devices.working_memory import working_within
from ..errors import ArgumentError
from ..patterns import Pattern, PatternRules
from ..plan import PlannedLayer
from .base import Choice, LayerMethod, MaskMethod, Network, NetworkMethod, as_method
from .given import given_masks

_REFIT_RIDGE = 1e-4  # small, as no weight is removed yet

Patterns = Mapping[str, Pattern]
Weights = Mapping[str, Tensor]


class LayerStatistics(Protocol):
    """What layer methods may read of the layers that are solved next, by their index in the group."""

    def dense_gram(self, index: int = 0) -> Tensor: ...
    def moments(self, index: int = 0) -> Moments: ...


class MaskSource(Protocol):
    @property
    def by_layer(self) -> bool:
        """Whether masks are chosen layer by layer, while the cascade passes them."""

    def before_sweep(self, patterns: Patterns, weights: Weights) -> Choice:
        """The masks that are chosen for all layers together, from their weights before the sweep."""

    def at_layers(self, group: Sequence[PlannedLayer], statistics: LayerStatistics, weights: Weights) -> Choice:
        """The masks that are chosen when the cascade arrives at these layers."""


@dataclass(frozen=True)
class GivenMasks:
    """Masks that the caller gave. They are used exactly as they are."""

    masks: Mapping[str, Tensor]
    by_layer = False

    def before_sweep(self, patterns: Patterns, weights: Weights) -> Choice:
        return Choice(dict(self.masks))

    def at_layers(self, group: Sequence[PlannedLayer], statistics: LayerStatistics, weights: Weights) -> Choice:
        return Choice({})


@dataclass(frozen=True)
class NetworkMasks:
    """A method that chooses all masks together."""

    method: NetworkMethod
    network: Callable[[Patterns, Weights], Network]
    by_layer = False

    def before_sweep(self, patterns: Patterns, weights: Weights) -> Choice:
        choice = self.method.choose(self.network(patterns, weights))
        missing = [name for name in patterns if name not in choice.masks]
        if missing:
            raise ArgumentError(f"the mask method {self.method!r} gave no mask for {', '.join(missing[:3])}")
        return choice

    def at_layers(self, group: Sequence[PlannedLayer], statistics: LayerStatistics, weights: Weights) -> Choice:
        return Choice({})


@dataclass(frozen=True)
class LayerMasks:
    """A method that chooses one layer's mask at a time, within so many bytes of working memory."""

    method: LayerMethod
    readjusted: bool  # whether the kept weights are re-adjusted afterwards
    most_bytes: int
    ranks: Ranks = ALONE
    by_layer = True

    def before_sweep(self, patterns: Patterns, weights: Weights) -> Choice:
        return Choice({})

    def at_layers(self, group: Sequence[PlannedLayer], statistics: LayerStatistics, weights: Weights) -> Choice:
        masks: dict[str, Tensor] = {}
        changed: dict[str, Tensor] = {}
        with working_within(self.most_bytes), sharing(self.ranks):
            for index, planned in enumerate(group):
                chosen = self._choose(planned, index, statistics, weights[planned.layer.parameter])
                masks |= chosen.masks
                changed |= chosen.weights
        return Choice(masks, changed)

    def _choose(self, planned: PlannedLayer, index: int, statistics: LayerStatistics, weight: Tensor) -> Choice:
        """With the statistics that the method reads, see `LayerMethod`."""
        name, pattern = planned.layer.parameter, planned.required_pattern
        reads = getattr(self.method, "reads", "pruned")
        if reads == "auto":
            reads = "dense" if self.readjusted else "refitted"
        moments = Moments(statistics.dense_gram(index)) if reads == "dense" else statistics.moments(index)

        def chosen() -> Choice:
            start = moments.refit(weight.flatten(1), _REFIT_RIDGE).view_as(weight) if reads == "refitted" else weight
            return self.method.choose_layer(name, start, moments.gram, pattern)

        return self.ranks.together(chosen)


def read_mask(
    mask: Any, rules: PatternRules | None, prepared: Prepared
) -> tuple[dict[str, Tensor] | None, MaskMethod | None]:
    """The masks that `mask` gives by parameter name, or the method that will choose them."""
    given = given_masks(mask, prepared)
    if given is None and rules is None and prepared.own_masks:
        given = given_masks("weights", prepared)
    if given is not None:
        return given, None
    if rules is None:
        raise ArgumentError("no pattern is given; expected one such as '2:4' or 0.7, or masks that need none")
    return None, as_method(mask)
