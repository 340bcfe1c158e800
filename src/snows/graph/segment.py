"""Pieces of a graph as pure functions: values by name in, values by name out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from .chain import Chain, Linearization
from .convolution import convolution
from .cost import Cost
from .layers import Layer
from .operators import Derivative, operator_of

Values = dict[str, Any]  # tensors, and integers where the graph computes sizes


class Program:
    """Some nodes of the graph as one function of the values and parameters they read. Compiled at the first call.

    With `first_order` the function has first derivatives only, from kernels that are faster.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        gives: Iterable[Node],
        parameter_names: Mapping[Node, str],
        first_order: bool = False,
    ) -> None:
        self.first_order = first_order
        nodes = list(nodes)
        inside = set(nodes)
        outside = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside)
        gives = [node for node in dict.fromkeys(gives) if node in inside]
        self.reads = tuple(n.name for n in outside if n not in parameter_names)
        self.parameters = tuple(parameter_names[n] for n in outside if n in parameter_names)
        self.gives = tuple(node.name for node in gives)
        self._outside = sorted(outside, key=lambda n: n in parameter_names)
        self.nodes = nodes
        self._results = gives
        self._names = {node: parameter_names[node] for node in outside if node in parameter_names}
        self._linearizations: dict[tuple[str, ...], Linearization] = {}

    @cached_property
    def _module(self) -> fx.GraphModule:
        graph = fx.Graph()
        copies: dict[Node, Node] = {}
        for node in self._outside:
            copies[node] = graph.placeholder(node.name)
        for node in self.nodes:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            if operator_of(node).derivative is Derivative.CONVOLUTION and not self.first_order:
                copies[node].target = convolution
            if self.first_order and operator_of(node).products:
                copies[node] = graph.call_function(noticing_interrupts, (copies[node],))
        graph.output(tuple(copies[node] for node in self._results))
        return fx.GraphModule(torch.nn.Module(), graph)

    def __call__(self, values: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> Values:
        arguments = [values[name] for name in self.reads] + [parameters[name] for name in self.parameters]
        # The fused kernels of attention have no second derivatives.
        with nullcontext() if self.first_order else sdpa_kernel(SDPBackend.MATH):
            results = self._module.forward(*arguments)
        return dict(zip(self.gives, results, strict=True))

    def linearize(
        self, values: Mapping[str, Any], parameters: Mapping[str, Tensor], varying: Sequence[str], dtype: torch.dtype
    ) -> tuple[list[Tensor], Chain]:
        """The outputs, and their Jacobian with respect to the `varying` parameters, held in `dtype`."""
        by_name = {name: node for node, name in self._names.items()}
        key = tuple(varying)
        if key not in self._linearizations:
            inputs = [by_name[name] for name in varying]
            self._linearizations[key] = Linearization(self.nodes, inputs, self._results)
        known = {node: parameters[name] for name, node in by_name.items()}
        known |= {node: values[node.name] for node in self._outside if node not in self._names}
        with sdpa_kernel(SDPBackend.MATH):
            return self._linearizations[key].at(known, dtype)


def noticing_interrupts(value: Tensor) -> Tensor:
    """The same value. Its backward pass calls Python here, which notices Ctrl-C; otherwise it is one native call."""
    if isinstance(value, Tensor) and value.requires_grad:
        value.register_hook(lambda gradient: None)
    return value


@dataclass(frozen=True)
class SampleLayout:
    """Where the samples of a batch are in a tensor: along `axis`, as its slow index or (`inner`) as its fast one."""

    axis: int
    inner: bool

    def split(self, value: Tensor, samples: int) -> Tensor:
        """One row per sample."""
        sizes = (-1, samples) if self.inner else (samples, -1)
        split = value.unflatten(self.axis, sizes)
        rows: Tensor = split.movedim(self.axis + int(self.inner), 0).flatten(1)
        return rows


@dataclass(frozen=True)
class Segment:
    """A layer, or several that are solved together, with the next K operations.

    `body` is the part that varies with the layers' weights. `prelude` computes what the body reads but the weights do
    not change (a parallel branch, for example). `own` is each layer alone. `outputs` are the values of operations
    0 … K.
    """

    layers: tuple[Layer, ...]
    prelude: Program
    body: Program
    own: tuple[Program, ...]
    outputs: tuple[str, ...]
    sample_layouts: tuple[SampleLayout | None, ...]
    piecewise_linear: bool
    batch_first: bool  # whether every value it reads has its samples along the first axis and no other
    cost: Cost

    @property
    def position(self) -> int:
        """The position of the first layer."""
        return min(layer.position for layer in self.layers)

    @property
    def horizon(self) -> int:
        return len(self.outputs) - 1

    @property
    def is_matched_itself(self) -> bool:
        """Whether operation 0 is a layer's own output. For query, key and value it is the attention they feed."""
        return self.outputs[0] in self.own[0].gives

    @property
    def is_one_layer(self) -> bool:
        """Whether the outputs are those of one layer and nothing else: the K=0 problem, which has a closed form."""
        return len(self.own) == 1 and self.outputs == self.own[0].gives
