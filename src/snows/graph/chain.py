"""A segment's derivative at a point, as a chain of small linear maps: one for each node.

Autograd gives the same products (`snows.linear`), but walks a graph of a graph for each of them. Here nodes with a rule
cost about one kernel forth and one back, scales and activations in a row are one factor, and each map may be held in a
smaller dtype than the values it was taken at. Nodes without a rule are differentiated by autograd, each for itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node, map_arg

from ..linear import differentiate
from .convolution import Arguments, convolve, input_gradient, spread_arguments, weight_gradient
from .operations import ADDITION, ELEMENTWISE, LINEAR, LINEAR_ALONE, PLAIN_CONVOLUTION, RELU, SCALING, SHIFT_AND_SCALE

Pulled = Sequence[Tensor]
Push = Callable[..., Tensor]
Pull = Callable[[Tensor], Pulled]


_Found = tuple[Tensor, Push, Pull, Tensor | float | None]  # a node's value, its map, its factor if that is all


@dataclass(frozen=True)
class Step:
    """One node: from tangents of its sources to its own, and from its cotangent to theirs."""

    name: str
    sources: tuple[str, ...]
    push: Push
    pull: Pull
    factor: Tensor | float | None = None  # where the map multiplies by this, and that is all


class Chain:
    """The Jacobian of `outputs` with respect to `inputs`, in working precision `dtype`."""

    def __init__(self, steps: Sequence[Step], inputs: Sequence[str], outputs: Sequence[str], dtype: torch.dtype):
        self._steps = steps
        self._inputs, self._outputs, self._dtype = tuple(inputs), tuple(outputs), dtype
        last = {source: index for index, step in enumerate(steps) for source in step.sources}
        self._over: list[list[str]] = [[] for _ in steps]  # tangents that no later step reads
        for name, index in last.items():
            if name not in self._outputs:
                self._over[index].append(name)

    def push(self, tangents: Sequence[Tensor]) -> list[Tensor]:
        alive = {name: tangent.to(self._dtype) for name, tangent in zip(self._inputs, tangents, strict=True)}
        for step, over in zip(self._steps, self._over, strict=True):
            alive[step.name] = step.push(*[alive[source] for source in step.sources])
            for name in over:
                del alive[name]
        return [alive[name] for name in self._outputs]

    def pull(self, cotangents: Sequence[Tensor], factors: Sequence[float]) -> list[Tensor]:
        """Of the cotangents, each times its factor. Results are in the dtype of a tangent's parts."""
        given = {name: (u, c) for name, u, c in zip(self._outputs, cotangents, factors, strict=True)}
        waiting: dict[str, Tensor] = {}
        for step in reversed(self._steps):
            u = waiting.pop(step.name, None)
            if step.name in given:
                own, factor = given.pop(step.name)
                u = factor * own.to(self._dtype) if u is None else torch.add(u, own, alpha=factor)
            if u is None:
                continue
            for source, back in zip(step.sources, step.pull(u), strict=True):
                waiting[source] = waiting[source] + back if source in waiting else back
        return [waiting[name] for name in self._inputs]


def linearize_nodes(
    nodes: Iterable[Node],
    known: Mapping[Node, Any],
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    dtype: torch.dtype,
) -> tuple[list[Tensor], Chain]:
    """Run the nodes; the values of `outputs`, and their Jacobian with respect to `inputs`."""
    nodes = list(nodes)
    last = {argument: index for index, node in enumerate(nodes) for argument in node.all_input_nodes}
    over: dict[int, list[Node]] = {}
    for node, index in last.items():
        if node not in outputs:
            over.setdefault(index, []).append(node)
    maker = _Maker(dict(known), set(inputs), set(outputs), dtype)
    with torch.no_grad():
        for index, node in enumerate(nodes):
            maker.add(node)
            for done in over.get(index, ()):
                maker.values.pop(done, None)
    names = [node.name for node in outputs]
    return [maker.values[node] for node in outputs], Chain(
        list(maker.steps.values()), [node.name for node in inputs], names, dtype
    )


class _Maker:
    """Runs node after node, and makes their maps."""

    def __init__(self, values: dict[Node, Any], varying: set[Node], outputs: set[Node], dtype: torch.dtype) -> None:
        self.values, self.varying, self.outputs, self.dtype = values, varying, outputs, dtype
        self.steps: dict[str, Step] = {}
        self._bundles: dict[Node, tuple[tuple[Node, ...], list[Tensor], Callable[..., Any]]] = {}  # several values each

    def add(self, node: Node) -> None:
        assert node.target is operator.getitem or not self._bundles.keys() & set(node.all_input_nodes)
        sources = tuple(argument for argument in node.all_input_nodes if argument in self.varying)
        call, at = self._call(node, sources), [self.values[source] for source in sources]
        parent = node.args[0] if node.target is operator.getitem else None
        if isinstance(parent, Node) and parent in self._bundles:  # one of several values: with what gave them
            sources, at, several = self._bundles[parent]
            call = lambda *x: several(*x)[node.args[1]]  # noqa: E731
        result = node.meta["val"]
        if not isinstance(result, Tensor) or not result.is_floating_point():  # a size, a comparison, several values
            self.values[node] = call(*at)
            if isinstance(result, tuple | list):
                self._bundles[node] = sources, at, call
            return
        rules = (rule(self, node, sources, call) for targets, rule in _RULES if node.target in targets)
        found = next((found for found in rules if found is not None), None) or self._by_autograd(call, at)
        self.values[node], push, pull, factor = found
        self.varying.add(node)
        step = Step(node.name, tuple(source.name for source in sources), push, pull, factor)
        self.steps[node.name] = self._merged(node, step)

    def _merged(self, node: Node, step: Step) -> Step:
        """A factor right behind another that nothing else reads: one factor."""
        before = self.steps.get(step.sources[0])
        source = node.all_input_nodes[0] if len(node.all_input_nodes) == 1 else None
        if step.factor is None or before is None or before.factor is None or source is None:
            return step
        if source in self.outputs or len(source.users) > 1:
            return step
        del self.steps[before.name]
        factor = step.factor * before.factor
        return Step(node.name, before.sources, *_times(factor), factor)

    def _call(self, node: Node, sources: tuple[Node, ...]) -> Callable[..., Any]:
        """The node as a function of its varying arguments; the others as they are now."""
        fixed = {argument: self.values[argument] for argument in node.all_input_nodes if argument not in sources}

        def call(*varying: Any) -> Any:
            now = {**fixed, **dict(zip(sources, varying, strict=True))}
            return node.target(*map_arg(node.args, now.__getitem__), **map_arg(node.kwargs, now.__getitem__))  # type: ignore[operator]

        return call

    def _by_autograd(self, call: Callable[..., Tensor], at: Sequence[Tensor]) -> _Found:
        (value,), push, pull = differentiate(lambda *x: (call(*x),), at)
        full, small = value.dtype, self.dtype
        return (
            value,
            lambda *t: push([x.to(full) for x in t])[0].to(small),
            lambda u: [x.to(small) for x in pull([u.to(full)])],
            None,
        )

    def small(self, value: Tensor) -> Tensor:
        return value.to(self.dtype)


def _times(factor: Tensor | float) -> tuple[Push, Pull]:
    return lambda t: t * factor, lambda u: (u * factor,)


def _convolution(maker: _Maker, node: Node, sources: tuple[Node, ...], call: Callable[..., Tensor]) -> _Found | None:
    x_node, weight_node = node.args[:2]
    if len(sources) != 1 or sources[0] not in (x_node, weight_node):
        return None
    value = call(maker.values[sources[0]])
    x, weight = (maker.small(maker.values[argument]) for argument in (x_node, weight_node))  # type: ignore[index]
    rest: tuple[Any, ...] = node.args[3:]
    arguments = spread_arguments(weight, *rest, **{k: v for k, v in node.kwargs.items() if k != "bias"})  # type: ignore[arg-type]
    if sources[0] is x_node:
        return value, *_moving_input(weight, x.shape[2:], arguments), None
    return value, *_moving_weight(x, weight.shape, arguments), None


def _moving_input(weight: Tensor, size: Sequence[int], arguments: Arguments) -> tuple[Push, Pull]:
    return lambda t: convolve(t, weight, *arguments), lambda u: (input_gradient(u, weight, size, *arguments),)


def _moving_weight(x: Tensor, shape: torch.Size, arguments: Arguments) -> tuple[Push, Pull]:
    def pull(u: Tensor) -> Pulled:
        return (weight_gradient(u, x, u.new_empty(()).expand(shape), *arguments),)

    return lambda v: convolve(x, v, *arguments), pull


def _linear(maker: _Maker, node: Node, sources: tuple[Node, ...], call: Callable[..., Tensor]) -> _Found | None:
    x_node, weight_node = node.args[:2]
    if len(sources) != 1 or sources[0] not in (x_node, weight_node):
        return None
    value = call(maker.values[sources[0]])
    if sources[0] is x_node:
        weight = maker.small(maker.values[weight_node])  # type: ignore[index]
        return value, lambda t: F.linear(t, weight), lambda u: (u @ weight,), None
    x = maker.small(maker.values[x_node])  # type: ignore[index]
    rows = x.reshape(-1, x.shape[-1])
    return value, lambda v: F.linear(x, v), lambda u: (u.reshape(-1, u.shape[-1]).T @ rows,), None


def _addition(maker: _Maker, node: Node, sources: tuple[Node, ...], call: Callable[..., Tensor]) -> _Found | None:
    value = call(*[maker.values[source] for source in sources])
    plain = node.kwargs.get("alpha", 1) == 1 and sum(argument in sources for argument in node.args) == len(sources)
    if not plain or any(maker.values[source].shape != value.shape for source in sources):
        return None
    if len(sources) == 1:
        return value, lambda t: t, lambda u: (u,), 1.0
    return value, lambda a, b: a + b, lambda u: (u, u), None


def _scale_and_shift(
    maker: _Maker, node: Node, sources: tuple[Node, ...], call: Callable[..., Tensor]
) -> _Found | None:
    if sources != (node.args[1],) or node.kwargs:
        return None
    return _factor(call(maker.values[sources[0]]), maker, node, sources, maker.values[node.args[2]])  # type: ignore[index]


def _scaling(maker: _Maker, node: Node, sources: tuple[Node, ...], call: Callable[..., Tensor]) -> _Found | None:
    other = node.args[1] if sources == (node.args[0],) else node.args[0] if sources == (node.args[1],) else None
    other = maker.values[other] if isinstance(other, Node) else other
    if not isinstance(other, Tensor | float | int) or node.kwargs or node.args[0] is node.args[1]:
        return None
    return _factor(call(maker.values[sources[0]]), maker, node, sources, other)


def _elementwise(maker: _Maker, node: Node, sources: tuple[Node, ...], call: Callable[..., Tensor]) -> _Found | None:
    if node.all_input_nodes != list(sources) or len(sources) != 1:
        return None
    x = maker.values[sources[0]]
    if node.target in RELU:
        value = call(x)
        return _factor(value, maker, node, sources, value > 0)
    variable = x.detach().requires_grad_()
    with torch.enable_grad():
        value = call(variable)
    (slope,) = torch.autograd.grad(value, variable, torch.ones_like(value))
    return _factor(value.detach(), maker, node, sources, slope)


def _factor(value: Tensor, maker: _Maker, node: Node, sources: tuple[Node, ...], factor: Any) -> _Found | None:
    if value.shape != maker.values[sources[0]].shape:
        return None
    factor = maker.small(factor) if isinstance(factor, Tensor) else float(factor)
    return (value, *_times(factor), factor)


def _linear_alone(maker: _Maker, node: Node, sources: tuple[Node, ...], call: Callable[..., Tensor]) -> _Found | None:
    tensors = [argument for argument in node.all_input_nodes if isinstance(maker.values[argument], Tensor)]
    value = call(*[maker.values[source] for source in sources])
    if tensors != list(sources):
        return None
    at = [maker.values[source].new_zeros((), dtype=maker.dtype).expand_as(maker.values[source]) for source in sources]
    _, _, pull = differentiate(lambda *x: (call(*x),), at)
    return value, call, lambda u: pull([u]), None


_RULES = (
    (PLAIN_CONVOLUTION, _convolution),
    (LINEAR, _linear),
    (ADDITION, _addition),
    (SHIFT_AND_SCALE, _scale_and_shift),
    (SCALING, _scaling),
    (ELEMENTWISE, _elementwise),
    (LINEAR_ALONE, _linear_alone),
)
