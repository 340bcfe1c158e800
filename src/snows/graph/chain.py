"""A segment's derivative at one point, as a chain of small linear maps: one for each node.

Autograd gives the same products (`autodiff`), but it walks a graph of a graph for each of them. Here a node costs about
one kernel forth and one back, scales and activations in a row become one factor, and the maps may be held in a smaller
dtype than the values they were made at. A node without a rule of its own is differentiated by autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .derivatives import Factor, Known, Local, Make, Pull, Push, Run, computation, derivative_of, is_factor, times
from .operators import returned_with_others


@dataclass(frozen=True)
class Step:
    """The derivative of one node, as a map between named tangents and cotangents."""

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
        last_read = {source: index for index, step in enumerate(steps) for source in step.sources}
        self._freed_after: list[list[str]] = [[] for _ in steps]
        for name, index in last_read.items():
            if name not in outputs:
                self._freed_after[index].append(name)

    def push(self, tangents: Sequence[Tensor]) -> list[Tensor]:
        """J v: one tangent for each output."""
        alive = {name: tangent.to(self._dtype) for name, tangent in zip(self._inputs, tangents, strict=True)}
        for step, freed in zip(self._steps, self._freed_after, strict=True):
            alive[step.name] = step.push(*[alive[source] for source in step.sources])
            for name in freed:
                del alive[name]
        return [alive[name] for name in self._outputs]

    def pull(self, cotangents: Sequence[Tensor], factors: Sequence[float]) -> list[Tensor]:
        """Jᵀ u: one cotangent for each input. Each cotangent u counts with its factor."""
        arriving = {name: (u, c) for name, u, c in zip(self._outputs, cotangents, factors, strict=True)}
        waiting: dict[str, Tensor] = {}
        for step in reversed(self._steps):
            u = waiting.pop(step.name, None)
            if step.name in arriving:
                own, factor = arriving.pop(step.name)
                own = own.to(self._dtype)
                u = factor * own if u is None else torch.add(u, own, alpha=factor)
            if u is None:
                continue
            for source, back in zip(step.sources, step.pull(u), strict=True):
                waiting[source] = waiting[source] + back if source in waiting else back
        return [waiting[name] for name in self._inputs]


@dataclass
class _Entry:
    """What is done at one node: it is computed, and if it varies, its derivative is made."""

    node: Node
    sources: tuple[Node, ...]  # the arguments that vary
    run: Run
    make: Make | None  # None: the value does not vary
    merged: Node | None = None  # the node before it, if both are factors and nothing else reads that one
    freed: list[Node] = field(default_factory=list)  # values that nothing reads after this node


class Linearization:
    """How the derivative of some nodes is made. Decided once, then used for every micro-batch."""

    def __init__(self, nodes: Iterable[Node], inputs: Sequence[Node], outputs: Sequence[Node]) -> None:
        self._inputs, self._outputs = list(inputs), list(outputs)
        self._entries: dict[Node, _Entry] = {}
        varying = set(inputs)
        for node in nodes:
            entry = self._entries[node] = self._entry(node, varying)
            if entry.make is not None:
                varying.add(node)
        self._free_after_last_read()

    def at(self, known: Known, dtype: torch.dtype) -> tuple[list[Tensor], Chain]:
        """Run the nodes: the values of the outputs, and their Jacobian with respect to the inputs."""
        values = dict(known)
        steps: dict[str, Step] = {}
        with torch.no_grad():
            for node, entry in self._entries.items():
                if entry.make is None:
                    values[node] = entry.run(values)
                else:
                    local = entry.make(values, dtype)
                    values[node] = local.value
                    _add_step(steps, entry, local)
                for done in entry.freed:
                    values.pop(done, None)
        inputs, outputs = ([node.name for node in nodes] for nodes in (self._inputs, self._outputs))
        return [values[node] for node in self._outputs], Chain(list(steps.values()), inputs, outputs, dtype)

    def _entry(self, node: Node, varying: set[Node]) -> _Entry:
        several = self._several(node)
        if several is not None:  # its derivative is made together with the node that returns the values
            make = derivative_of(several.node, several.sources, _one_of(several.run, node.args[1]))
            return _Entry(node, several.sources, computation(node), make)
        sources = tuple(argument for argument in node.all_input_nodes if argument in varying)
        entry = _Entry(node, sources, computation(node), None)
        value = node.meta["val"]
        if not sources or not isinstance(value, Tensor) or not value.is_floating_point():
            return entry  # a size, a comparison, or several values
        entry.make = derivative_of(node, sources, entry.run)
        if is_factor(node, sources) and self._is_private_factor(sources[0]):
            entry.merged = sources[0]
        return entry

    def _is_private_factor(self, node: Node) -> bool:
        """Whether a node is a factor that only one other node reads."""
        entry = self._entries.get(node)
        if entry is None or not is_factor(node, entry.sources):
            return False
        return len(node.users) == 1 and node not in self._outputs

    def _several(self, node: Node) -> _Entry | None:
        """If the node takes one of several varying values: the entry of the node that returns them."""
        parent = returned_with_others(node)
        entry = None if parent is None else self._entries.get(parent)
        return entry if entry is not None and entry.sources else None

    def _free_after_last_read(self) -> None:
        last: dict[Node, Node] = {}
        for node in self._entries:
            last.update(dict.fromkeys(node.all_input_nodes, node))
            several = self._several(node)
            if several is not None:
                last.update(dict.fromkeys(several.node.all_input_nodes, node))
        for node, reader in last.items():
            if node not in self._outputs:
                self._entries[reader].freed.append(node)


def _add_step(steps: dict[str, Step], entry: _Entry, local: Local) -> None:
    """Add a node's step. Two factors in a row become one step."""
    name, sources = entry.node.name, tuple([source.name for source in entry.sources])
    before = None if entry.merged is None else steps[entry.merged.name]
    if before is None or before.factor is None or local.factor is None:
        steps[name] = Step(name, sources, local.push, local.pull, local.factor)
        return
    del steps[before.name]
    factor = local.factor * before.factor
    steps[name] = Step(name, before.sources, *times(factor), factor)


def _one_of(several: Run, index: Any) -> Run:
    return lambda values: several(values)[index]
