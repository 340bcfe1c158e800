"""Exported programs in functional form: no in-place operation, no batch norm, no operation without second derivatives.

torch can do this for any program, but it traces the whole network a second time, which takes most of the time of a
capture. If a network has only common operations, it is enough to replace single nodes. (Capture checks in any case that
the graph computes what the model does.)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, rsqrt
from torch.export import ExportedProgram
from torch.fx import Graph, Node, map_arg

from .operators import Memory, aten, operator_of, out_of_place

_BATCH_NORM = aten.batch_norm.default


def made_functional(exported: ExportedProgram) -> ExportedProgram:
    """The program in functional form."""
    if replace_nodes(exported):
        return exported
    decomposed: ExportedProgram = exported.run_decompositions(_DECOMPOSITIONS)
    return decomposed


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Eval-mode batch norm as one scale and shift: one pass over the data, and no tuple that a segment could cut."""
    scale = rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias
    shape = [-1] + [1] * (x.ndim - 2)
    return aten.addcmul.default(shift.view(shape), x, scale.view(shape)), x.new_empty(0), x.new_empty(0)


def _hardsigmoid(x: Tensor) -> Tensor:
    """torch has no second derivative of its own hardsigmoid."""
    return (x + 3).clamp(0, 6) / 6


def _detach(x: Tensor) -> Tensor:
    """The output depends on a detached value too, so derivatives have to pass."""
    same: Tensor = aten.alias.default(x)
    return same


_DECOMPOSITIONS: dict[Any, Any] = {
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten.hardsigmoid.default: _hardsigmoid,
    aten.detach.default: _detach,
}


def replace_nodes(exported: ExportedProgram) -> bool:
    """Replace in-place operations and batch norms in the program itself.

    False if that is not enough for this program; then nothing has changed.
    """
    calls = [node for node in exported.graph.nodes if node.op == "call_function"]
    if not all(_is_common(node) for node in calls):
        return False
    for node in calls:
        if node.target is _BATCH_NORM:
            _replace_batch_norm(exported.graph, node)
        elif out_of_place(node) is not None:
            _replace_in_place(exported.graph, node)
    return True


def _is_common(node: Node) -> bool:
    if node.target is _BATCH_NORM:
        _, _, _, mean, variance, training, *_ = node.args
        return isinstance(mean, Node) and isinstance(variance, Node) and training is False
    if out_of_place(node) is not None:
        changed: Any = node.args[0]
        return all(_is_in_own_memory(each) for each in (changed, *changed.users))  # nothing else sees the change
    return operator_of(node).memory is not Memory.UNKNOWN


def _is_in_own_memory(node: Node) -> bool:
    return operator_of(node).memory is Memory.NEW or out_of_place(node) is not None


def _replace_in_place(graph: Graph, node: Node) -> None:
    """Whatever reads the changed value later reads the new value instead."""
    changed: Any = node.args[0]
    order = {other: index for index, other in enumerate(graph.nodes)}
    place = order[node]
    target: Any = out_of_place(node)
    with graph.inserting_before(node):
        new = graph.call_function(target, node.args, node.kwargs)
    _take_place(graph, new, node)
    changed.replace_all_uses_with(new, lambda user: user is not new and order[user] > place)


def _replace_batch_norm(graph: Graph, node: Node) -> None:
    """One scale and shift, as in `_batch_norm`."""
    x, weight, bias, mean, variance, _, _, eps, *_ = node.args
    shape = [-1] + [1] * (node.meta["val"].ndim - 2)

    def call(target: Any, *args: Any) -> Node:
        new = graph.call_function(target, args)
        new.meta["val"] = target(*map_arg(args, lambda argument: argument.meta["val"]))
        return new

    with graph.inserting_before(node):
        scale = call(aten.rsqrt.default, call(aten.add.Tensor, variance, eps))
        if weight is not None:
            scale = call(aten.mul.Tensor, scale, weight)
        shift = call(aten.mul.Tensor, call(aten.neg.default, mean), scale)
        if bias is not None:
            shift = call(aten.add.Tensor, shift, bias)
        shift, scale = (call(aten.view.default, part, shape) for part in (shift, scale))
        new = graph.call_function(aten.addcmul.default, (shift, x, scale))
    _take_place(graph, new, node)


def _take_place(graph: Graph, new: Node, node: Node) -> None:
    """Put one node in the place of another. It takes the name too: the program's signature knows outputs by name."""
    new.meta, name = dict(node.meta), node.name
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    new.name = name
