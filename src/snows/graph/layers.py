"""Layers: the operations whose weight can be pruned, seen as matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from .operators import Family, argument_of, is_layer, operator_of


@dataclass(frozen=True)
class Layer:
    """A convolution or linear operation with a weight of its own.

    `refusal` is the reason why its weight cannot be pruned (None if it can).
    """

    name: str
    parameter: str
    shape: torch.Size
    call: Node | None = None  # None if no operation of the graph applies the weight; `refusal` says why
    uses: tuple[Node, ...] = ()  # every node that reads the weight
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] | str = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    refusal: str | None = None

    @property
    def in_graph(self) -> bool:
        """Whether an operation of the graph applies the weight."""
        return self.call is not None

    @property
    def node(self) -> Node:
        """The operation that applies the weight."""
        if self.call is None:
            raise LookupError(f"{self.name} is no operation of the graph: {self.refusal}")
        return self.call

    @property
    def position(self) -> int:
        """The layer's place in the order of execution."""
        return int(self.node.meta["position"])

    @property
    def weight(self) -> Node:
        """The parameter that the operation reads as its weight."""
        return self.node.all_input_nodes[1]

    @property
    def input(self) -> str:
        """The name of the value the layer reads."""
        return self.node.all_input_nodes[0].name

    @property
    def bias(self) -> str | None:
        """The name of the parameter that is added to the layer's output, if there is one."""
        bias = argument_of(self.node, 2, "bias")
        return str(bias.meta["parameter"]) if isinstance(bias, Node) else None

    @property
    def columns(self) -> int:
        """Inputs of one output: the width of the weight as a matrix."""
        return math.prod(self.shape[1:])

    @property
    def positions(self) -> int:
        """How often each weight is used for one sample: the number of positions in the layer's output."""
        return max(1, int(self.node.meta["flops"]) // (2 * self.shape.numel()))

    @property
    def is_convolution(self) -> bool:
        return len(self.shape) > 2

    def patches(self, x: Tensor) -> Tensor:
        """The inputs of each output position: groups x positions x columns.

        Columns are in the order of memory, which is several times faster: kernel positions first, channels last.
        `in_weight_order` brings results into the weight's order.
        """
        if not self.is_convolution:
            return x.reshape(1, -1, x.shape[-1])
        kernel = self.shape[2:]
        x = self._pad(x, kernel)
        for axis, (size, stride, dilation) in enumerate(zip(kernel, self.stride, self.dilation, strict=True)):
            x = x.unfold(2 + axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
        # batch, channels, *positions, *kernel -> groups, batch * positions, kernel * channels / group
        dimensions = len(kernel)
        x = x.unflatten(1, (self.groups, -1))
        positions = list(range(3, 3 + dimensions))
        window = list(range(3 + dimensions, 3 + 2 * dimensions))
        x = x.permute(1, 0, *positions, *window, 2)
        return x.reshape(self.groups, -1, self.columns)

    def in_weight_order(self, value: Tensor, *axes: int) -> Tensor:
        """The value with its columns, which are along these axes, in the order of the weight: channels, then kernel."""
        kernel = math.prod(self.shape[2:])
        if kernel == 1:
            return value
        shape = value.shape
        for axis in sorted((axis % len(shape) for axis in axes), reverse=True):  # of views, so that it is copied once
            value = value.unflatten(axis, (kernel, -1)).transpose(axis, axis + 1)
        return value.reshape(shape)

    def outputs(self, y: Tensor) -> Tensor:
        """The layer's output in the layout of `patches`: groups x positions x outputs of a group."""
        y = y.movedim(1, -1) if self.is_convolution else y
        return y.reshape(-1, self.groups, self.shape[0] // self.groups).movedim(1, 0)

    def _pad(self, x: Tensor, kernel: torch.Size) -> Tensor:
        if self.padding == "valid":
            return x
        if self.padding == "same":  # an odd element goes to the end, as in torch
            totals = [d * (k - 1) for k, d in zip(kernel, self.dilation, strict=True)]
            widths = [(total // 2, total - total // 2) for total in totals]
        else:
            widths = [(int(p), int(p)) for p in self.padding]
        return F.pad(x, [side for pair in reversed(widths) for side in pair])


def find_layers(
    calls: Sequence[Node], parameter_names: Mapping[Node, str], parameters: Mapping[str, Tensor]
) -> list[Layer]:
    """Every convolution and linear operation whose weight is a parameter, in order of execution."""
    uses = _uses(calls, parameter_names)
    layers: dict[str, Layer] = {}
    for node in calls:
        weight = argument_of(node, 1, "weight") if is_layer(node) else None
        parameter = parameter_names.get(weight, "") if isinstance(weight, Node) else ""
        if parameter in layers or parameter not in parameters or parameters[parameter].ndim < 2:
            continue
        shape = parameters[parameter].shape
        layers[parameter] = Layer(
            layer_name(parameter), parameter, shape, node, uses[parameter],
            refusal=_shared(uses[parameter]), **_options(node, len(shape) - 2),
        )  # fmt: skip
    return list(layers.values())


def _uses(calls: Sequence[Node], parameter_names: Mapping[Node, str]) -> dict[str, tuple[Node, ...]]:
    """For each parameter the nodes that read it."""
    uses: dict[str, list[Node]] = {}
    for node in calls:
        for source in node.all_input_nodes:
            if source in parameter_names:
                uses.setdefault(parameter_names[source], []).append(node)
    return {name: tuple(nodes) for name, nodes in uses.items()}


def _shared(places: Sequence[Node]) -> str | None:
    """Why a weight that is read in these places cannot be pruned."""
    if len(places) == 1:
        return None
    modules = ", ".join(sorted({module_of(place) or "the model itself" for place in places}))
    return f"its weight is used in {len(places)} places ({modules})"


def layer_name(parameter: str) -> str:
    """`block.conv.weight` is called `block.conv`; `attention.in_proj_weight` keeps its name."""
    return parameter.removesuffix(".weight") if parameter != "weight" else parameter


def module_of(node: Node) -> str:
    """The name of the module that a node was called in."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


def _options(node: Node, dimensions: int) -> dict[str, Any]:
    """Stride, padding, dilation and groups of a convolution."""
    if operator_of(node).family is not Family.CONVOLUTION:
        return {}

    def spread(value: Sequence[int]) -> tuple[int, ...]:
        """One number for each spatial dimension."""
        return tuple(value) * dimensions if len(value) == 1 else tuple(value)

    padding = argument_of(node, 4, "padding", [0])
    return {
        "stride": spread(argument_of(node, 3, "stride", [1])),
        "padding": padding if isinstance(padding, str) else spread(padding),
        "dilation": spread(argument_of(node, 5, "dilation", [1])),
        "groups": argument_of(node, 6, "groups", 1),
    }
