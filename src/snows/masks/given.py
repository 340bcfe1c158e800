"""Masks that the caller brings: tensors by name, files, pruned copies of the model, or the model's own.

A mask is used exactly as it is given. `masks_from_tensors` says how entries of a mapping or a file are understood,
`preparation` what the masks are that a model comes with, and what is then the dense network.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.preparation import Prepared
from ..data.weights import mask_names, read_state, unwrapped
from ..errors import ArgumentError, InputError, SnowsWarning
from ..graph import Graph, Layer
from ..graph.layers import layer_name

_FILES = (".safetensors", ".pt", ".pth")
_EXPECTED = "expected a bool tensor or one of 0 and 1, True or 1 where a weight is kept"


def is_mask_file(mask: object) -> bool:
    """Whether `mask` names a file: a path, or a string that ends like one."""
    return isinstance(mask, os.PathLike) or (isinstance(mask, str) and mask.endswith(_FILES))


def given_masks(mask: Any, world: Prepared) -> dict[str, Tensor] | None:
    """Masks by parameter name where `mask` says them itself; None where it is a method that chooses them."""
    if isinstance(mask, str) and mask == "weights":
        return masks_from_weights(world)
    if isinstance(mask, nn.Module):
        return masks_from_tensors(mask.state_dict(), world.graph, f"the {type(mask).__name__} given as the mask")
    if is_mask_file(mask):
        return masks_from_tensors(read_state(Path(mask)), world.graph, str(mask))
    if isinstance(mask, Mapping):
        return masks_from_tensors(mask, world.graph)
    return None


def masks_from_tensors(given: Mapping[Any, Any], graph: Graph, origin: str = "the given mask") -> dict[str, Tensor]:
    """{name: tensor} as masks by parameter name. The tensors are either masks or a state dict, by one rule:

    They are **masks** if every tensor is bool or holds nothing but 0 and 1, or if one of a layer is bool or goes by the
    layer's name (`conv`, not `conv.weight`). Each must then be the mask of a layer, under the name of its parameter
    (`conv.weight`), of the layer (`conv`), either with `_mask` behind it (as torch.nn.utils.prune does), or ASP's
    (`conv.__weight_mma_mask`).

    Anything else is a **state dict**. If it holds masks of the model's layers under the names that torch.nn.utils.prune
    or ASP give them, these are the masks; if not, the zeros of the layers' weights are. Layers without zeros stay
    dense, and entries that are no layers (biases, batch norms) are passed over.

    `module.` before every name (DataParallel) is taken off.
    """
    if not given:
        raise ArgumentError(f"{origin} is empty; expected {{name: tensor}} with at least one layer")
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise ArgumentError(f"the mask of {str(name)!r} is a {type(value).__name__}; {_EXPECTED}")
    tensors = unwrapped({str(name): value for name, value in given.items()}, graph.parameters)
    parameters = {layer.parameter for layer in graph.layers}
    layers = {layer.name for layer in graph.layers} - parameters
    says_masks = any(
        name in layers or (name in parameters and value.dtype == torch.bool) for name, value in tensors.items()
    )
    if says_masks or all(_is_mask(value) for value in tensors.values()):
        found = _named_masks(tensors, graph)
    else:
        found = _masks_of_state(tensors, graph, origin)
    return {name: kept.to(graph.parameters[name].device) for name, kept in found.items() if name in graph.parameters}


def masks_from_weights(world: Prepared) -> dict[str, Tensor]:
    """The zeros of the weights; where a layer came with a mask, that mask (a kept weight may be zero by chance)."""
    found = {}
    for layer in world.graph.layers:
        weight, own = world.graph.parameters.get(layer.parameter), world.own_masks.get(layer.parameter)
        if weight is not None:
            found[layer.parameter] = weight != 0 if own is None else own.kept.to(weight.device)
    found = {name: kept for name, kept in found.items() if not bool(kept.all())}
    if not found:
        raise InputError("mask='weights', but no weight of the model is zero; prune it first, or choose a mask method")
    return found


def settle_reference(world: Prepared, masks: Mapping[str, Tensor]) -> None:
    """What given masks are re-adjusted to: dense weights, where the model holds them; a warning where none is known."""
    names = [layer.parameter for layer in world.graph.layers if layer.parameter in masks and layer.refusal is None]
    world.take_dense(names)
    removed = [world.graph.parameters[name][~masks[name]] for name in names]
    if any(len(weights) for weights in removed) and not any(bool(weights.any()) for weights in removed):
        warnings.warn(
            "every weight that the mask removes is already zero in the model: the sparse network is its own reference, "
            "and there is nothing to re-adjust; if you have the dense weights, give them as the model and the pruned "
            "ones as the mask: prune(dense_model, ..., mask=pruned_model) or mask='pruned.safetensors', on the command "
            "line --weights dense.safetensors --mask pruned.safetensors",
            SnowsWarning,
            stacklevel=3,
        )


def warn_of_empty_rows(masks: Mapping[str, Tensor]) -> None:
    for name, mask in masks.items():
        empty = int((~mask.flatten(1).any(1)).sum())
        if empty:
            warnings.warn(
                f"the mask of {layer_name(name)} removes every weight of {empty} of its {mask.shape[0]} outputs",
                SnowsWarning,
                stacklevel=3,
            )


def _named_masks(tensors: Mapping[str, Tensor], graph: Graph) -> dict[str, Tensor]:
    by_name = {
        name: layer
        for layer in graph.layers
        for name in (layer.parameter, layer.name, *mask_names(layer.parameter), f"{layer.name}_mask")
    }
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        layer = by_name.get(name)
        if layer is None:
            raise ArgumentError(f"the mask names {name!r}, which is no layer of the model; {_some_layers(graph)}")
        if layer.refusal is not None:
            raise InputError(f"the mask names {name!r}, which cannot be pruned: {layer.refusal}")
        if layer.parameter in found:
            raise ArgumentError(f"there are two masks of the layer {layer.name!r}; expected one, under one name")
        found[layer.parameter] = _checked(name, value, layer)
    return found


def _masks_of_state(state: Mapping[str, Tensor], graph: Graph, origin: str) -> dict[str, Tensor]:
    """The masks that a state dict holds by name, or else the zeros of its weights."""
    named = {name: layer for layer in graph.layers for name in mask_names(layer.parameter) if name in state}
    if named:
        found = {layer.parameter: _checked(name, state[name], layer) for name, layer in named.items()}
    else:
        layers = [layer for layer in graph.layers if layer.parameter in state]
        if not layers:
            raise InputError(
                f"{origin} holds neither masks nor weights of the model's layers: its entries are "
                f"{', '.join(list(state)[:3])} …, {_some_layers(graph)}"
            )
        found = {layer.parameter: _fits(layer.parameter, state[layer.parameter], layer) != 0 for layer in layers}
    found = {name: kept for name, kept in found.items() if not bool(kept.all())}
    if not found:
        raise InputError(
            f"{origin} holds {'masks that remove nothing' if named else 'weights, and none of a layer is zero'}; "
            "expected masks (bools, or 0 and 1), or the weights of a pruned network"
        )
    return found


def _checked(name: str, value: Tensor, layer: Layer) -> Tensor:
    if not _is_mask(value):
        raise ArgumentError(
            f"the mask of {name!r} is {value.dtype} with values other than 0 and 1; {_EXPECTED} "
            f"(pruned weights go by the names of their parameters, such as {layer.parameter!r})"
        )
    return _fits(name, value, layer) != 0


def _fits(name: str, value: Tensor, layer: Layer) -> Tensor:
    if value.shape != layer.shape:
        raise InputError(
            f"the mask of {name!r} has shape {tuple(value.shape)}; the weight has shape {tuple(layer.shape)}"
        )
    return value


def _is_mask(value: Tensor) -> bool:
    return value.dtype == torch.bool or bool(((value == 0) | (value == 1)).all())


def _some_layers(graph: Graph) -> str:
    names = [layer.name for layer in graph.layers]
    return f"its layers are {', '.join(names[:12])}" + (" …" if len(names) > 12 else "")
