"""The prepared network with its channels re-ordered."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..errors import ArgumentError
from ..patterns import Pattern
from ..patterns.permutation import Permuted, permute_channels
from .preparation import Prepared, with_weights

_SAMPLES = 8  # on which the permuted network must give the same outputs


def permuted(model: nn.Module, prepared: Prepared, patterns: Mapping[str, Pattern], given: bool, seed: int) -> Permuted:
    """The same network with channels re-ordered for the N:M patterns. `given`: whether the masks are given."""
    if given:
        raise ArgumentError("permute re-orders channels, which a given mask would not follow; leave one of them out")
    if all(pattern.group is None for pattern in patterns.values()):
        raise ArgumentError("permute is for N:M patterns; expected one such as '2:4'")
    first = next(model.parameters())
    args, kwargs = prepared.samples.to(first.device, first.dtype).call_arguments(0, _SAMPLES)
    return permute_channels(with_weights(model, {}), prepared.graph, patterns, args, kwargs, seed)
