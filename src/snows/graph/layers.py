"""Layers: the operations whose weight can be pruned, as matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from .operators import CONVOLUTION, LINEAR


@dataclass(frozen=True)
class Layer:
    """A convolution or linear operation with a weight of its own.

    `refusal` says why its weight cannot be pruned at all (None if it can).
    """

    name: str
    parameter: str
    shape: torch.Size
    node: Node | None = None
    uses: tuple[Node, ...] = ()  # every node that reads the weight
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] | str = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    refusal: str | None = None

    @property
    def position(self) -> int:
        """Where the layer stands in the order of execution."""
        assert self.node is not None
        return int(self.node.meta["position"])

    @property
    def input(self) -> str:
        """The name of the value the layer reads."""
        assert self.node is not None
        source = self.node.args[0]
        assert isinstance(source, Node)
        return source.name

    @property
    def bias(self) -> str | None:
        """The name of the parameter that is added to the layer's output, if there is one."""
        assert self.node is not None
        bias = self.node.args[2] if len(self.node.args) > 2 else self.node.kwargs.get("bias")
        return str(bias.meta["parameter"]) if isinstance(bias, Node) else None

    @property
    def columns(self) -> int:
        """Inputs of one output: the width of the weight seen as a matrix."""
        return math.prod(self.shape[1:])

    @property
    def positions(self) -> int:
        """How often each weight is used for one sample: the positions of the layer's output."""
        assert self.node is not None
        return max(1, int(self.node.meta["flops"]) // (2 * self.shape.numel()))

    @property
    def is_convolution(self) -> bool:
        return len(self.shape) > 2

    def patches(self, x: Tensor) -> Tensor:
        """The inputs of each output position: groups x positions x columns.

        Columns are in the order of memory, which is several times faster: kernel positions first, channels last.
        `in_weight_order` puts what is computed from them into the weight's order.
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
        """The same with the columns along these axes in the order of the flattened weight: channels, then kernel."""
        kernel = math.prod(self.shape[2:])
        if kernel == 1:
            return value
        order = torch.arange(self.columns, device=value.device).view(kernel, -1).T.flatten()
        for axis in axes:
            value = value.index_select(axis, order)
        return value

    def outputs(self, y: Tensor) -> Tensor:
        """The layer's output laid out like `patches`: groups x positions x outputs of a group."""
        y = y.movedim(1, -1) if self.is_convolution else y
        return y.reshape(-1, self.groups, self.shape[0] // self.groups).movedim(1, 0)

    def _pad(self, x: Tensor, kernel: torch.Size) -> Tensor:
        if self.padding == "valid":
            return x
        if self.padding == "same":  # the odd element goes to the end, as in torch
            totals = [d * (k - 1) for k, d in zip(kernel, self.dilation, strict=True)]
            widths = [(total // 2, total - total // 2) for total in totals]
        else:
            widths = [(int(p), int(p)) for p in self.padding]
        return F.pad(x, [side for pair in reversed(widths) for side in pair])


def find_layers(nodes: list[Node], parameter_names: dict[Node, str], parameters: dict[str, Tensor]) -> list[Layer]:
    """Every convolution and linear operation whose weight is a parameter, in order of execution."""
    uses: dict[str, list[Node]] = {}
    for node in nodes:
        for argument in node.all_input_nodes:
            if argument in parameter_names:
                name = parameter_names[argument]
                uses.setdefault(name, []).append(node)
    layers: dict[str, Layer] = {}
    for node in nodes:
        weight = node.args[1] if node.target in CONVOLUTION | LINEAR and len(node.args) > 1 else None
        if not isinstance(weight, Node) or weight not in parameter_names:
            continue
        parameter = parameter_names[weight]
        if parameter in layers or parameter not in parameters or parameters[parameter].ndim < 2:
            continue
        places = uses[parameter]
        shared = ", ".join(sorted({module_of(place) or "the model itself" for place in places}))
        refusal = f"its weight is used in {len(places)} places ({shared})" if len(places) > 1 else None
        shape = parameters[parameter].shape
        layers[parameter] = Layer(
            layer_name(parameter),
            parameter,
            shape,
            node,
            tuple(places),
            refusal=refusal,
            **_convolution(node, len(shape) - 2),
        )
    return list(layers.values())


def layer_name(parameter: str) -> str:
    """`block.conv.weight` is known as `block.conv`; `attention.in_proj_weight` keeps its name."""
    return parameter.removesuffix(".weight") if parameter != "weight" else parameter


def module_of(node: Node) -> str:
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


def _convolution(node: Node, dimensions: int) -> dict[str, Any]:
    if node.target not in CONVOLUTION:
        return {}

    def argument(position: int, name: str, default: Any) -> Any:
        return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)

    spread: Callable[[Any], tuple[int, ...]] = lambda value: (  # noqa: E731
        tuple(value) * dimensions if len(value) == 1 else tuple(value)
    )
    padding = argument(4, "padding", [0])
    return {
        "stride": spread(argument(3, "stride", [1])),
        "padding": padding if isinstance(padding, str) else spread(padding),
        "dilation": spread(argument(5, "dilation", [1])),
        "groups": argument(6, "groups", 1),
    }
