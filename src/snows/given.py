"""Masks that the caller brings: a mapping, the zeros of the weights, torch.nn.utils.prune modules."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import ArgumentError, InputError, SnowsWarning
from .graph import Graph
from .graph.layers import layer_name


def masks_from_mapping(given: Mapping[Any, Any], graph: Graph) -> dict[str, Tensor]:
    """{parameter or layer name: bool tensor}, checked, by parameter name."""
    by_name = {layer.parameter: layer for layer in graph.layers} | {layer.name: layer for layer in graph.layers}
    found: dict[str, Tensor] = {}
    for name, value in given.items():
        layer = by_name.get(str(name))
        if layer is None:
            known = ", ".join(layer.name for layer in graph.layers[:12])
            raise ArgumentError(f"the mask names {name!r}, which is no layer of the model; its layers are {known} …")
        if layer.refusal is not None:
            raise InputError(f"the mask names {name!r}, which cannot be pruned: {layer.refusal}")
        if not isinstance(value, Tensor) or value.dtype != torch.bool:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ArgumentError(f"the mask of {name!r} is {kind}; expected a bool tensor, True where a weight is kept")
        if value.shape != layer.shape:
            raise InputError(
                f"the mask of {name!r} has shape {tuple(value.shape)}; the weight has shape {tuple(layer.shape)}"
            )
        found[layer.parameter] = value.to(graph.parameters[layer.parameter].device)
    if not found:
        raise ArgumentError("the given mask is empty; expected {name: bool tensor} with at least one layer")
    return found


def masks_from_weights(graph: Graph, absorbed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The zeros of the weights; where a layer came with a mask, that mask (a kept weight may be zero by chance)."""
    weights = {layer.parameter: graph.parameters.get(layer.parameter) for layer in graph.layers}
    masks = {n: absorbed[n].to(w.device) if n in absorbed else w != 0 for n, w in weights.items() if w is not None}
    found = {name: mask for name, mask in masks.items() if not bool(mask.all())}
    if not found:
        raise InputError("mask='weights', but no weight of the model is zero; prune it first, or choose a mask method")
    return found


def warn_of_empty_rows(masks: Mapping[str, Tensor]) -> None:
    for name, mask in masks.items():
        empty = int((~mask.flatten(1).any(1)).sum())
        if empty:
            warnings.warn(
                f"the mask of {layer_name(name)} removes every weight of {empty} of its {mask.shape[0]} outputs",
                SnowsWarning,
                stacklevel=3,
            )
