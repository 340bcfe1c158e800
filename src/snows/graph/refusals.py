"""Weights that cannot be pruned because no convolution or linear operation reads them directly, with the reason."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.fx import Node

from .layers import Layer, layer_name
from .operators import Family, operator_of

_PRUNABLE_MODULES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_TRANSPOSED_MODULES = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

_TRANSPOSED = "transposed convolutions are not supported"
_COMPUTED = "its weight is computed from other parameters"
_TRANSFORMED = "its weight is transformed before it is used"
_MULTIPLIED = "its weight is used in a plain matrix product, not in a linear layer"
_RECURRENT = "recurrent layers are not supported"
_UNUSED = "forward does not use it"

_REASONS = {
    Family.CONVOLUTION: _TRANSFORMED,
    Family.LINEAR: _TRANSFORMED,
    Family.TRANSPOSED_CONVOLUTION: _TRANSPOSED,
    Family.PRODUCT: _MULTIPLIED,
    Family.BILINEAR: _MULTIPLIED,
    Family.RECURRENT: _RECURRENT,
}
_WITH_ONE_WEIGHT = (Family.CONVOLUTION, Family.LINEAR, Family.TRANSPOSED_CONVOLUTION)  # as their second argument


def refused_layers(
    model: nn.Module,
    found: Collection[str],
    aliases: Mapping[str, str],
    calls: Sequence[Node],
    parameter_names: Mapping[Node, str],
) -> list[Layer]:
    """Layers for the weights that are not among those `found` as parameters of convolutions and linear operations."""
    reasons = _indirect_weights(calls, parameter_names)
    layers = list(_modules_without_operation(model, found, aliases, reasons))
    listed = {*found, *(layer.parameter for layer in layers)}
    inside = tuple(f"{layer.name}." for layer in layers)  # what a computed weight is computed from
    for name, value in model.named_parameters():
        if name in reasons and value.ndim > 1 and name not in listed and not name.startswith(inside):
            layers.append(Layer(layer_name(name), name, value.shape, refusal=reasons[name]))
    return layers


def _modules_without_operation(
    model: nn.Module, found: Collection[str], aliases: Mapping[str, str], reasons: Mapping[str, str]
) -> Iterator[Layer]:
    """Convolution and linear modules whose weight no such operation of the graph reads."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, _PRUNABLE_MODULES + _TRANSPOSED_MODULES) or not isinstance(weight, Tensor):
            continue
        parameter = f"{name}.weight" if name else "weight"
        if aliases.get(parameter, parameter) in found:
            continue
        if isinstance(module, _TRANSPOSED_MODULES):
            reason = _TRANSPOSED
        elif not isinstance(weight, nn.Parameter):
            reason = _COMPUTED
        else:
            reason = reasons.get(parameter, _UNUSED)
        yield Layer(layer_name(parameter), parameter, weight.shape, refusal=reason)


def _indirect_weights(calls: Sequence[Node], parameter_names: Mapping[Node, str]) -> dict[str, str]:
    """Parameters that the data is multiplied with other than as the weight of a layer, each with the reason."""
    made_of: dict[Node, set[str]] = {node: {name} for node, name in parameter_names.items()}
    reasons: dict[str, str] = {}
    for node in calls:
        sources = [a for a in node.all_input_nodes if not isinstance(a.meta.get("val"), int | torch.SymInt)]
        if all(source in made_of for source in sources):  # computed from parameters alone
            made_of[node] = {name for source in sources for name in made_of[source]}
            continue
        family = operator_of(node).family
        if family in _REASONS:
            weights = sources[1:2] if family in _WITH_ONE_WEIGHT else sources
            names = {name for weight in weights for name in made_of.get(weight, ())}
            reasons |= dict.fromkeys(names, _REASONS[family])
    return reasons
