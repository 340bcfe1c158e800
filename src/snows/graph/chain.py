"""A segment's derivative at a point, as a chain of small linear maps: one for each node.

Autograd gives the same products (`snows.linear`), but walks a graph of a graph for each of them. Here nodes with a rule
cost about one kernel forth and one back, scales and activations in a row are one factor, and maps may be held in a
smaller dtype than the values they were taken at. Nodes without a rule are differentiated by autograd, each for itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node, map_arg

from .autodiff import differentiate
from .convolution import Arguments, convolve, input_gradient, spread_arguments, weight_gradient
from .operators import ADDITION, ELEMENTWISE, LINEAR, LINEAR_ALONE, PLAIN_CONVOLUTION, RELU, SCALING, SHIFT_AND_SCALE

Push = Callable[..., Tensor]
Pull = Callable[[Tensor], Sequence[Tensor]]
Factor = Tensor | float
Known = Mapping[Node, Any]
Local = tuple[Tensor, Push, Pull, Factor | None]  # a node's value, its map, and its factor if that is all the map is
Make = Callable[[Known, torch.dtype], Local]


@dataclass(frozen=True)
class Step:
    """One node: from tangents of its sources to its own, and from its cotangent to theirs."""

    name: str
    sources: tuple[str, ...]
    push: Push
    pull: Pull
    factor: Factor | None = None


class Chain:
    """The Jacobian of `outputs` with respect to `inputs`, held in `dtype`."""

    def __init__(self, steps: Sequence[Step], inputs: Sequence[str], outputs: Sequence[str], dtype: torch.dtype):
        self._steps = steps
        self._inputs, self._outputs, self._dtype = inputs, outputs, dtype
        last = {source: index for index, step in enumerate(steps) for source in step.sources}
        self._over: list[list[str]] = [[] for _ in steps]  # tangents that no later step reads
        for name, index in last.items():
            if name not in outputs:
                self._over[index].append(name)

    def push(self, tangents: Sequence[Tensor]) -> list[Tensor]:
        alive = {name: tangent.to(self._dtype) for name, tangent in zip(self._inputs, tangents, strict=True)}
        for step, over in zip(self._steps, self._over, strict=True):
            alive[step.name] = step.push(*[alive[source] for source in step.sources])
            for name in over:
                del alive[name]
        return [alive[name] for name in self._outputs]

    def pull(self, cotangents: Sequence[Tensor], factors: Sequence[float]) -> list[Tensor]:
        """Of the cotangents, each times its factor."""
        given = {name: (u, c) for name, u, c in zip(self._outputs, cotangents, factors, strict=True)}
        waiting: dict[str, Tensor] = {}
        for step in reversed(self._steps):
            u = waiting.pop(step.name, None)
            if step.name in given:
                own, factor = given.pop(step.name)
                own = own.to(self._dtype)
                u = factor * own if u is None else torch.add(u, own, alpha=factor)
            if u is None:
                continue
            for source, back in zip(step.sources, step.pull(u), strict=True):
                waiting[source] = waiting[source] + back if source in waiting else back
        return [waiting[name] for name in self._inputs]


@dataclass
class _Entry:
    """What is done at one node: it is run, and where it varies its map is made."""

    node: Node
    sources: tuple[Node, ...]
    run: Callable[[Known], Any]
    make: Make | None
    merged: Node | None = None  # a factor right before it, that nothing else reads: the two are one factor
    over: list[Node] = field(default_factory=list)  # values that nothing reads after it


class Linearization:
    """How some nodes are linearized: decided once, done for every micro-batch."""

    def __init__(self, nodes: Iterable[Node], inputs: Sequence[Node], outputs: Sequence[Node]) -> None:
        self._inputs, self._outputs = list(inputs), list(outputs)
        self._entries: dict[Node, _Entry] = {}
        varying = set(inputs)
        for node in nodes:
            entry = self._entries[node] = self._entry(node, varying)
            if entry.make is not None:
                varying.add(node)
        last: dict[Node, Node] = {}
        for node in self._entries:
            last.update(dict.fromkeys(node.all_input_nodes, node))
            parent = self._bundle(node)
            if parent is not None:
                last.update(dict.fromkeys(parent.all_input_nodes, node))
        for node, reader in last.items():
            if node not in self._outputs:
                self._entries[reader].over.append(node)

    def at(self, known: Known, dtype: torch.dtype) -> tuple[list[Tensor], Chain]:
        """Run the nodes; the values of the outputs, and their Jacobian with respect to the inputs."""
        values = dict(known)
        steps: dict[str, Step] = {}
        with torch.no_grad():
            for node, entry in self._entries.items():
                if entry.make is None:
                    values[node] = entry.run(values)
                else:
                    values[node], push, pull, factor = entry.make(values, dtype)
                    sources = tuple([source.name for source in entry.sources])
                    if entry.merged is not None:
                        before = steps.pop(entry.merged.name)
                        assert factor is not None
                        assert before.factor is not None
                        factor, sources = factor * before.factor, before.sources
                        push, pull = _times(factor)
                    steps[node.name] = Step(node.name, sources, push, pull, factor)
                for done in entry.over:
                    values.pop(done, None)
        inputs, outputs = ([node.name for node in nodes] for nodes in (self._inputs, self._outputs))
        return [values[node] for node in self._outputs], Chain(list(steps.values()), inputs, outputs, dtype)

    def _entry(self, node: Node, varying: set[Node]) -> _Entry:
        bundle = self._bundle(node)
        if bundle is not None:  # one of several values: with what gave them
            sources, several = self._entries[bundle].sources, self._entries[bundle].run
            return _Entry(node, sources, _reader(node), _by_autograd(lambda v: several(v)[node.args[1]], sources))
        bundled = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), tuple | list)]
        assert not any(self._entries[argument].sources for argument in bundled if argument in self._entries)
        sources = tuple(argument for argument in node.all_input_nodes if argument in varying)
        entry = _Entry(node, sources, _reader(node), None)
        value = node.meta["val"]
        if not sources or not isinstance(value, Tensor) or not value.is_floating_point():
            return entry  # a size, a comparison, or several values
        rules = (rule(node, sources, entry.run) for targets, rule in _RULES if node.target in targets)
        entry.make = next((make for make in rules if make is not None), None) or _by_autograd(entry.run, sources)
        before = self._entries.get(sources[0])
        if _is_factor(node, sources) and before is not None and _is_factor(before.node, before.sources):
            alone = len(sources) == 1 and before.node not in self._outputs and len(before.node.users) == 1
            entry.merged = before.node if alone else None
        return entry

    def _bundle(self, node: Node) -> Node | None:
        """What gave several values at once, of which the node takes one."""
        parent = node.args[0] if node.target is operator.getitem else None
        varies = isinstance(parent, Node) and parent in self._entries and self._entries[parent].sources
        return parent if varies and isinstance(parent.meta["val"], tuple | list) else None  # type: ignore[union-attr,return-value]


def _reader(node: Node) -> Callable[[Known], Any]:
    """The node as a function of the values it reads."""
    target: Any = node.target
    args, kwargs = node.args, node.kwargs
    if len(node.all_input_nodes) == len({argument for argument in args if isinstance(argument, Node)}):  # none nested
        return lambda values: target(*[values[a] if isinstance(a, Node) else a for a in args], **kwargs)
    return lambda values: target(*map_arg(args, values.__getitem__), **map_arg(kwargs, values.__getitem__))


def _by_autograd(run: Callable[[Known], Any], sources: Sequence[Node]) -> Make:
    def make(values: Known, dtype: torch.dtype) -> Local:
        def call(*varying: Tensor) -> tuple[Tensor]:
            return (run({**values, **dict(zip(sources, varying, strict=True))}),)

        (value,), push, pull = differentiate(call, [values[source] for source in sources])
        full = value.dtype
        return (
            value,
            lambda *t: push([x.to(full) for x in t])[0].to(dtype),
            lambda u: [x.to(dtype) for x in pull([u.to(full)])],
            None,
        )

    return make


def _times(factor: Factor) -> tuple[Push, Pull]:
    return lambda t: t * factor, lambda u: (u * factor,)


def _scaled(value: Tensor, factor: Any, dtype: torch.dtype) -> Local:
    factor = factor.to(dtype) if isinstance(factor, Tensor) else float(factor)
    return (value, *_times(factor), factor)


def _same_shape(a: Node, b: Node) -> bool:
    sizes = ([s if isinstance(s, int) else s.node.expr for s in node.meta["val"].shape] for node in (a, b))
    return next(sizes) == next(sizes)


# Rules: how a node's map is made, or None where the rule does not hold.


def _convolution(node: Node, sources: tuple[Node, ...], run: Callable[[Known], Any]) -> Make | None:
    x, weight = node.args[:2]
    if len(sources) != 1 or sources[0] not in (x, weight):
        return None
    rest: Any = node.args[3:]
    options: Any = {name: value for name, value in node.kwargs.items() if name != "bias"}
    arguments = spread_arguments(weight.meta["val"], *rest, **options)  # type: ignore[union-attr]
    map_of = _moving_input if sources[0] is x else _moving_weight

    def make(values: Known, dtype: torch.dtype) -> Local:
        return run(values), *map_of(values[x], values[weight], dtype, arguments), None  # type: ignore[index]

    return make


def _moving_input(x: Tensor, weight: Tensor, dtype: torch.dtype, arguments: Arguments) -> tuple[Push, Pull]:
    small, size = weight.to(dtype), x.shape[2:]
    return lambda t: convolve(t, small, *arguments), lambda u: (input_gradient(u, small, size, *arguments),)


def _moving_weight(x: Tensor, weight: Tensor, dtype: torch.dtype, arguments: Arguments) -> tuple[Push, Pull]:
    small, shape = x.to(dtype), weight.shape

    def pull(u: Tensor) -> Sequence[Tensor]:
        return (weight_gradient(u, small, u.new_empty(()).expand(shape), *arguments),)

    return lambda v: convolve(small, v, *arguments), pull


def _linear(node: Node, sources: tuple[Node, ...], run: Callable[[Known], Any]) -> Make | None:
    x, weight = node.args[:2]
    if sources == (x,):

        def moving_input(values: Known, dtype: torch.dtype) -> Local:
            matrix = values[weight].to(dtype)  # type: ignore[index]
            return run(values), lambda t: F.linear(t, matrix), lambda u: (u @ matrix,), None

        return moving_input
    if sources != (weight,):
        return None

    def moving_weight(values: Known, dtype: torch.dtype) -> Local:
        inputs = values[x].to(dtype)  # type: ignore[index]
        rows = inputs.reshape(-1, inputs.shape[-1])
        return run(values), lambda v: F.linear(inputs, v), lambda u: (u.reshape(-1, u.shape[-1]).T @ rows,), None

    return moving_weight


def _addition(node: Node, sources: tuple[Node, ...], run: Callable[[Known], Any]) -> Make | None:
    plain = node.kwargs.get("alpha", 1) == 1 and sum(argument in sources for argument in node.args) == len(sources)
    if not plain or not all(_same_shape(source, node) for source in sources):
        return None
    if len(sources) == 1:
        return lambda values, dtype: (run(values), lambda t: t, lambda u: (u,), None)
    return lambda values, dtype: (run(values), torch.add, lambda u: (u, u), None)


def _scale_and_shift(node: Node, sources: tuple[Node, ...], run: Callable[[Known], Any]) -> Make | None:
    if not _is_factor(node, sources):
        return None
    scale: Any = node.args[2]
    return lambda values, dtype: _scaled(run(values), values[scale], dtype)


def _scaling(node: Node, sources: tuple[Node, ...], run: Callable[[Known], Any]) -> Make | None:
    if not _is_factor(node, sources):
        return None
    scale: Any = node.args[1] if sources == (node.args[0],) else node.args[0]
    return lambda values, dtype: _scaled(run(values), values[scale] if isinstance(scale, Node) else scale, dtype)


def _elementwise(node: Node, sources: tuple[Node, ...], run: Callable[[Known], Any]) -> Make | None:
    if not _is_factor(node, sources):
        return None

    def relu(values: Known, dtype: torch.dtype) -> Local:
        value = run(values)
        return _scaled(value, value > 0, dtype)

    def other(values: Known, dtype: torch.dtype) -> Local:
        variable = values[sources[0]].detach().requires_grad_()
        with torch.enable_grad():
            value = run({sources[0]: variable})
        (slope,) = torch.autograd.grad(value, variable, torch.ones_like(value))
        return _scaled(value.detach(), slope, dtype)

    return relu if node.target in RELU else other


def _is_factor(node: Node, sources: tuple[Node, ...]) -> bool:
    """Whether each element of the node is one element of its only varying argument times a number."""
    if len(sources) != 1 or not _same_shape(sources[0], node):
        return False
    if node.target in SHIFT_AND_SCALE:
        return sources[0] is node.args[1] and sources[0] is not node.args[2] and not node.kwargs
    if node.target in SCALING:
        return node.args.count(sources[0]) == 1 and not node.kwargs
    return node.target in ELEMENTWISE and len(node.all_input_nodes) == 1


def _linear_alone(node: Node, sources: tuple[Node, ...], run: Callable[[Known], Any]) -> Make | None:
    tensors = [argument for argument in node.all_input_nodes if isinstance(argument.meta["val"], Tensor)]
    if tensors != list(sources):
        return None
    sizes = [argument for argument in node.all_input_nodes if argument not in sources]

    def make(values: Known, dtype: torch.dtype) -> Local:
        fixed = {argument: values[argument] for argument in sizes}  # a map must not hold the values it was taken at

        def call(*tangents: Tensor) -> Tensor:
            result: Tensor = run({**fixed, **dict(zip(sources, tangents, strict=True))})
            return result

        nowhere = [values[source].new_zeros((), dtype=dtype).expand_as(values[source]) for source in sources]
        pull = differentiate(lambda *t: (call(*t),), nowhere)[2]
        return run(values), call, lambda u: pull([u]), None

    return make


_RULES = (
    (PLAIN_CONVOLUTION, _convolution),
    (LINEAR, _linear),
    (ADDITION, _addition),
    (SHIFT_AND_SCALE, _scale_and_shift),
    (SCALING, _scaling),
    (ELEMENTWISE, _elementwise),
    (LINEAR_ALONE, _linear_alone),
)
