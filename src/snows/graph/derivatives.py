"""Derivatives of single nodes: for each kind in the table of operators, the rule that gives a cheap linear map."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node, map_arg

from .autodiff import differentiate
from .convolution import Arguments, convolve, input_gradient, spread_arguments, weight_gradient
from .operators import Derivative, operator_of, sizes_of

Push = Callable[..., Tensor]  # tangents of the sources -> tangent of the node
Pull = Callable[[Tensor], Sequence[Tensor]]  # cotangent of the node -> cotangents of the sources
Factor = Tensor | float
Known = Mapping[Node, Any]
Run = Callable[[Known], Any]  # computes the node from the values it reads


@dataclass(frozen=True)
class Local:
    """A node's value at some point, and its derivative there."""

    value: Tensor
    push: Push
    pull: Pull
    factor: Factor | None = None  # if the derivative multiplies each element with a number: these numbers


Make = Callable[[Known, torch.dtype], Local]
Rule = Callable[[Node, tuple[Node, ...], Run], Make | None]  # None where the rule does not hold


def derivative_of(node: Node, sources: tuple[Node, ...], run: Run) -> Make:
    """How the node's derivative with respect to `sources` is made: by its rule if that holds, else by autograd."""
    return _by_rule(node, sources, run) or _by_autograd(run, sources)


def has_rule(node: Node, sources: tuple[Node, ...]) -> bool:
    """Whether the rule of the node's row holds, so that autograd is not needed."""
    return _by_rule(node, sources, computation(node)) is not None


def _by_rule(node: Node, sources: tuple[Node, ...], run: Run) -> Make | None:
    rule = _RULES.get(operator_of(node).derivative)
    return None if rule is None else rule(node, sources, run)


def computation(node: Node) -> Run:
    """The node as a function of the values it reads."""
    target: Any = node.target
    args, kwargs = node.args, node.kwargs
    if len(node.all_input_nodes) == len({argument for argument in args if isinstance(argument, Node)}):  # none nested
        return lambda values: target(*[values[a] if isinstance(a, Node) else a for a in args], **kwargs)
    return lambda values: target(*map_arg(args, values.__getitem__), **map_arg(kwargs, values.__getitem__))


def is_factor(node: Node, sources: tuple[Node, ...]) -> bool:
    """Whether each element of the node depends on the same element of its only source, and on no other."""
    if len(sources) != 1 or sizes_of(sources[0]) != sizes_of(node):
        return False
    match operator_of(node).derivative:
        case Derivative.SCALE_AND_SHIFT:
            return sources[0] is node.args[1] and sources[0] is not node.args[2] and not node.kwargs
        case Derivative.SCALE:
            return node.args.count(sources[0]) == 1 and not node.kwargs
        case Derivative.RELU | Derivative.ELEMENTWISE:
            return len(node.all_input_nodes) == 1
        case _:
            return False


def times(factor: Factor) -> tuple[Push, Pull]:
    """The linear map that multiplies each element with a number."""
    return lambda t: t * factor, lambda u: (u * factor,)


def _by_autograd(run: Run, sources: Sequence[Node]) -> Make:
    """The derivative by autograd, in the precision of the values."""

    def make(values: Known, dtype: torch.dtype) -> Local:
        def call(*varying: Tensor) -> tuple[Tensor]:
            return (run({**values, **dict(zip(sources, varying, strict=True))}),)

        (value,), push, pull = differentiate(call, [values[source] for source in sources])
        full = value.dtype
        return Local(
            value,
            lambda *t: push([x.to(full) for x in t])[0].to(dtype),
            lambda u: [x.to(dtype) for x in pull([u.to(full)])],
        )

    return make


def _scaled(value: Tensor, factor: Any, dtype: torch.dtype) -> Local:
    factor = factor.to(dtype) if isinstance(factor, Tensor) else float(factor)
    return Local(value, *times(factor), factor)


def _convolution(node: Node, sources: tuple[Node, ...], run: Run) -> Make | None:
    args: Any = node.args
    x, weight, *_ = args
    if sources not in ((x,), (weight,)) or x is weight:
        return None
    options: Any = {name: value for name, value in node.kwargs.items() if name != "bias"}
    arguments = spread_arguments(weight.meta["val"], *args[3:], **options)
    map_of = _varying_input if sources == (x,) else _varying_weight

    def make(values: Known, dtype: torch.dtype) -> Local:
        return Local(run(values), *map_of(values[x], values[weight], dtype, arguments))

    return make


def _varying_input(x: Tensor, weight: Tensor, dtype: torch.dtype, arguments: Arguments) -> tuple[Push, Pull]:
    small, size = weight.to(dtype), x.shape[2:]
    return lambda t: convolve(t, small, *arguments), lambda u: (input_gradient(u, small, size, *arguments),)


def _varying_weight(x: Tensor, weight: Tensor, dtype: torch.dtype, arguments: Arguments) -> tuple[Push, Pull]:
    small, shape = x.to(dtype), weight.shape

    def pull(u: Tensor) -> Sequence[Tensor]:
        return (weight_gradient(u, small, u.new_empty(()).expand(shape), *arguments),)

    return lambda v: convolve(small, v, *arguments), pull


def _linear(node: Node, sources: tuple[Node, ...], run: Run) -> Make | None:
    args: Any = node.args
    x, weight, *_ = args

    def varying_input(values: Known, dtype: torch.dtype) -> Local:
        matrix = values[weight].to(dtype)
        return Local(run(values), lambda t: F.linear(t, matrix), lambda u: (u @ matrix,))

    def varying_weight(values: Known, dtype: torch.dtype) -> Local:
        inputs = values[x].to(dtype)
        rows = inputs.reshape(-1, inputs.shape[-1])
        return Local(run(values), lambda v: F.linear(inputs, v), lambda u: (u.reshape(-1, u.shape[-1]).T @ rows,))

    if x is weight:
        return None
    if sources == (x,):
        return varying_input
    return varying_weight if sources == (weight,) else None


def _addition(node: Node, sources: tuple[Node, ...], run: Run) -> Make | None:
    each_once = sum(argument in sources for argument in node.args) == len(sources)  # not x + x
    if node.kwargs.get("alpha", 1) != 1 or not each_once:
        return None
    if any(sizes_of(source) != sizes_of(node) for source in sources):
        return None
    if len(sources) == 1:
        return lambda values, dtype: Local(run(values), lambda t: t, lambda u: (u,))
    return lambda values, dtype: Local(run(values), torch.add, lambda u: (u, u))


def _scale_and_shift(node: Node, sources: tuple[Node, ...], run: Run) -> Make | None:
    if not is_factor(node, sources):
        return None
    scale: Any = node.args[2]
    return lambda values, dtype: _scaled(run(values), values[scale], dtype)


def _scale(node: Node, sources: tuple[Node, ...], run: Run) -> Make | None:
    if not is_factor(node, sources):
        return None
    scale: Any = node.args[1] if sources == (node.args[0],) else node.args[0]
    return lambda values, dtype: _scaled(run(values), values[scale] if isinstance(scale, Node) else scale, dtype)


def _relu(node: Node, sources: tuple[Node, ...], run: Run) -> Make | None:
    def make(values: Known, dtype: torch.dtype) -> Local:
        value = run(values)
        return _scaled(value, value > 0, dtype)

    return make if is_factor(node, sources) else None


def _elementwise(node: Node, sources: tuple[Node, ...], run: Run) -> Make | None:
    def make(values: Known, dtype: torch.dtype) -> Local:
        variable = values[sources[0]].detach().requires_grad_()
        with torch.enable_grad():
            value = run({sources[0]: variable})
        (slope,) = torch.autograd.grad(value, variable, torch.ones_like(value))
        return _scaled(value.detach(), slope, dtype)

    return make if is_factor(node, sources) else None


def _linear_map(node: Node, sources: tuple[Node, ...], run: Run) -> Make | None:
    tensors = [argument for argument in node.all_input_nodes if isinstance(argument.meta["val"], Tensor)]
    if tensors != list(sources):  # a fixed tensor would be added to every tangent
        return None
    sizes = [argument for argument in node.all_input_nodes if argument not in sources]

    def make(values: Known, dtype: torch.dtype) -> Local:
        fixed = {argument: values[argument] for argument in sizes}  # the map must not hold the values it was made at

        def push(*tangents: Tensor) -> Tensor:
            result: Tensor = run({**fixed, **dict(zip(sources, tangents, strict=True))})
            return result

        anywhere = [values[source].new_zeros((), dtype=dtype).expand_as(values[source]) for source in sources]
        pull = differentiate(lambda *t: (push(*t),), anywhere)[2]
        return Local(run(values), push, lambda u: pull([u]))

    return make


_RULES: dict[Derivative, Rule] = {
    Derivative.CONVOLUTION: _convolution,
    Derivative.LINEAR: _linear,
    Derivative.ADDITION: _addition,
    Derivative.SCALE_AND_SHIFT: _scale_and_shift,
    Derivative.SCALE: _scale,
    Derivative.RELU: _relu,
    Derivative.ELEMENTWISE: _elementwise,
    Derivative.LINEAR_MAP: _linear_map,
}
