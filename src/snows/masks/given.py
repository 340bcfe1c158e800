"""Masks that the caller brings: tensors by name, files, pruned copies of the model, or the model's own.

A given mask is used unchanged. `masks_from_tensors` explains how a mapping or a file is read, `data.preparation` which
masks a model may come with and what the dense network then is.
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
from ..data.tensors import is_mask, peculiarity
from ..data.weights import mask_names, read_state, unwrapped
from ..devices.weights import where_they_rest
from ..errors import ArgumentError, InputError, SnowsWarning, a_type
from ..graph import Graph, Layer
from ..graph.layers import layer_name

_LISTED = 3  # layers in a message
_FILES = (".safetensors", ".pt", ".pth")
_EXPECTED = "expected a bool tensor or one of 0 and 1, True or 1 where a weight is kept"


def is_mask_file(mask: object) -> bool:
    """Whether `mask` names a file: a path, or a string that ends like the name of one."""
    return isinstance(mask, os.PathLike) or (isinstance(mask, str) and mask.endswith(_FILES))


def given_masks(mask: Any, prepared: Prepared) -> dict[str, Tensor] | None:
    """The masks by parameter name, if `mask` holds or names them; None if it is a method that chooses them."""
    if isinstance(mask, str) and mask == "weights":
        return masks_from_weights(prepared)
    if isinstance(mask, nn.Module):
        return masks_from_tensors(mask.state_dict(), prepared.graph, f"the {type(mask).__name__} given as the mask")
    if is_mask_file(mask):
        return masks_from_tensors(read_state(Path(mask)), prepared.graph, str(mask))
    if isinstance(mask, Mapping):
        return masks_from_tensors(mask, prepared.graph)
    return None


def masks_from_tensors(given: Mapping[Any, Any], graph: Graph, origin: str = "the given mask") -> dict[str, Tensor]:
    """Masks by parameter name from {name: tensor}, which holds either masks or a state dict.

    The tensors are **masks** if every one of them is bool or holds only 0 and 1, or if the tensor of some layer is bool
    or is named after the layer (`conv`, not `conv.weight`). Each must then be the mask of a layer, named after its
    parameter (`conv.weight`), the layer (`conv`), either followed by `_mask` (as torch.nn.utils.prune does), or as ASP
    does it (`conv.__weight_mma_mask`).

    Otherwise they are a **state dict**. If it holds masks of the model's layers under the names that
    torch.nn.utils.prune or ASP give them, those are the masks; if not, the zeros of the layers' weights are. Layers
    without zeros stay dense, and entries that are no layers (biases, batch norms) are ignored.

    The prefix `module.` of DataParallel is removed from all names.
    """
    if not given:
        raise ArgumentError(f"{origin} is empty; expected {{name: tensor}} with at least one layer")
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise ArgumentError(f"the mask of {str(name)!r} is {a_type(value)}; {_EXPECTED}")
        problem = peculiarity(value)
        if problem is not None:
            raise InputError(f"the mask of {str(name)!r} is {problem}; expected a dense tensor of numbers")
    tensors = unwrapped({str(name): value for name, value in given.items()}, graph.parameters)
    parameters = {layer.parameter for layer in graph.layers}
    layers = {layer.name for layer in graph.layers} - parameters
    has_masks = any(
        name in layers or (name in parameters and value.dtype == torch.bool) for name, value in tensors.items()
    )
    if has_masks or all(is_mask(value) for value in tensors.values()):
        masks = _named_masks(tensors, graph)
    else:
        masks = _masks_of_state(tensors, graph, origin)
    weights = where_they_rest(graph.parameters)
    return {name: kept.to(weights[name].device) for name, kept in masks.items() if name in weights}


def masks_from_weights(prepared: Prepared) -> dict[str, Tensor]:
    """The layers' own masks, and the zeros of the weights of layers that have none."""
    masks, weights = {}, where_they_rest(prepared.graph.parameters)
    for layer in prepared.graph.layers:
        weight, own = weights.get(layer.parameter), prepared.own_masks.get(layer.parameter)
        if weight is not None:  # a mask is exact, whereas a kept weight may be zero by chance
            masks[layer.parameter] = weight != 0 if own is None else own.kept.to(weight.device)
    masks = _without_dense(masks)
    if not masks:
        raise InputError("mask='weights', but no weight of the model is zero; prune it first, or choose a mask method")
    return masks


def settle_reference(prepared: Prepared, masks: Mapping[str, Tensor]) -> None:
    """Take dense weights as the reference where the model holds them; warn if no layer has any."""
    layers = prepared.graph.layers
    names = [layer.parameter for layer in layers if layer.parameter in masks and layer.refusal is None]
    prepared.take_dense(names)
    weights = where_they_rest(prepared.graph.parameters)
    if not all(bool(masks[name].all()) for name in names) and not any(
        bool(weights[name][~masks[name]].any()) for name in names
    ):
        warnings.warn(
            "every weight that the mask removes is already zero in the model: the sparse network is its own reference, "
            "and there is nothing to re-adjust; if you have the dense weights, give them as the model and the pruned "
            "ones as the mask: prune(dense_model, ..., mask=pruned_model) or mask='pruned.safetensors', on the command "
            "line --weights dense.safetensors --mask pruned.safetensors",
            SnowsWarning,
            stacklevel=3,
        )


def warn_of_empty_rows(masks: Mapping[str, Tensor]) -> None:
    counts = {layer_name(name): (int((~mask.flatten(1).any(1)).sum()), mask.shape[0]) for name, mask in masks.items()}
    found = {name: (empty, outputs) for name, (empty, outputs) in counts.items() if empty}
    if not found:
        return
    if len(found) == 1:
        ((name, (empty, outputs)),) = found.items()
        said = f"the mask of {name} removes every weight of {empty} of its {outputs} outputs"
    else:
        listed = [f"{empty} of {outputs} in {name}" for name, (empty, outputs) in found.items()]
        more = f" and in {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
        said = (
            f"the masks of {len(found)} layers remove every weight of some outputs: {', '.join(listed[:_LISTED])}{more}"
        )
    warnings.warn(said, SnowsWarning, stacklevel=3)


def _named_masks(tensors: Mapping[str, Tensor], graph: Graph) -> dict[str, Tensor]:
    """The masks, each of which must be that of a layer."""
    by_name = {
        name: layer
        for layer in graph.layers
        for name in (layer.parameter, layer.name, *mask_names(layer.parameter), f"{layer.name}_mask")
    }
    masks: dict[str, Tensor] = {}
    for name, value in tensors.items():
        layer = by_name.get(name)
        if layer is None:
            raise ArgumentError(f"the mask names {name!r}, which is no layer of the model; {_some_layers(graph)}")
        if layer.refusal is not None:
            raise InputError(f"the mask names {name!r}, which cannot be pruned: {layer.refusal}")
        if layer.parameter in masks:
            raise ArgumentError(f"there are two masks of the layer {layer.name!r}; expected one, under one name")
        masks[layer.parameter] = _checked(name, value, layer)
    return masks


def _masks_of_state(state: Mapping[str, Tensor], graph: Graph, origin: str) -> dict[str, Tensor]:
    """The masks that a state dict holds by name, or else the zeros of its weights."""
    named = {name: layer for layer in graph.layers for name in mask_names(layer.parameter) if name in state}
    layers = [layer for layer in graph.layers if layer.parameter in state]
    if not named and not layers:
        raise InputError(
            f"{origin} holds neither masks nor weights of the model's layers: its entries are "
            f"{', '.join(list(state)[:3])} …, {_some_layers(graph)}"
        )
    if named:
        masks = {layer.parameter: _checked(name, state[name], layer) for name, layer in named.items()}
    else:
        masks = {layer.parameter: _nonzero(state[layer.parameter], layer) for layer in layers}
    masks = _without_dense(masks)
    if not masks:
        raise InputError(
            f"{origin} holds {'masks that remove nothing' if named else 'weights, and none of a layer is zero'}; "
            "expected masks (bools, or 0 and 1), or the weights of a pruned network"
        )
    return masks


def _without_dense(masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: kept for name, kept in masks.items() if not bool(kept.all())}


def _checked(name: str, value: Tensor, layer: Layer) -> Tensor:
    if not is_mask(value):
        raise ArgumentError(
            f"the mask of {name!r} is {value.dtype} with values other than 0 and 1; {_EXPECTED} "
            f"(pruned weights go by the names of their parameters, such as {layer.parameter!r})"
        )
    return _fits(name, value, layer) != 0


def _nonzero(weight: Tensor, layer: Layer) -> Tensor:
    if not weight.is_floating_point():
        raise InputError(f"the weight {layer.parameter!r} is {weight.dtype}; expected floats, or a mask")
    return _fits(layer.parameter, weight, layer) != 0


def _fits(name: str, value: Tensor, layer: Layer) -> Tensor:
    """The tensor, if it has the shape of the layer's weight."""
    if value.shape != layer.shape:
        raise InputError(
            f"the mask of {name!r} has shape {tuple(value.shape)}; the weight has shape {tuple(layer.shape)}"
        )
    return value


def _some_layers(graph: Graph) -> str:
    names = [layer.name for layer in graph.layers]
    return f"its layers are {', '.join(names[:12])}" + (" …" if len(names) > 12 else "")
