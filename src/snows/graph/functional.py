"""Plain convolutional networks without a second trace.

torch.export leaves in-place operations and batch norms as they were written; torch's way to be rid of them traces the
whole network once more, which takes most of the time of capture. In a network of nothing but common operations it is a
matter of replacing nodes one by one. (That the graph computes what the model does is checked in any case.)
"""

from __future__ import annotations

from typing import Any

from torch.export import ExportedProgram
from torch.fx import Graph, Node, map_arg

from .operators import CONVOLUTION, ELEMENTWISE, IN_PLACE, LINEAR, aten

_BATCH_NORM = aten.batch_norm.default
_FRESH = CONVOLUTION | LINEAR | ELEMENTWISE | {_BATCH_NORM, aten.add.Tensor, aten.mul.Tensor, aten.cat.default}
_COMMON = (
    (_FRESH - {aten.hardsigmoid.default})
    | IN_PLACE.keys()
    | {
        aten.max_pool2d.default, aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default, aten.mean.dim,
        aten.flatten.using_ints, aten.pad.default,
    }
)  # fmt: skip


def made_plain(exported: ExportedProgram) -> bool:
    """Replace in-place operations and batch norms, in the program itself. False, and nothing done, where that needs
    more than this module knows."""
    calls = [node for node in exported.graph.nodes if node.op == "call_function"]
    if not all(_is_common(node) for node in calls):
        return False
    for node in calls:
        if node.target in IN_PLACE:
            _replace_in_place(exported.graph, node)
        elif node.target is _BATCH_NORM:
            _replace_batch_norm(exported.graph, node)
    return True


def _is_common(node: Node) -> bool:
    if node.target in IN_PLACE:
        changed: Any = node.args[0]
        fresh = changed.op == "call_function" and (changed.target in _FRESH or changed.target in IN_PLACE)
        return fresh and all(user.target in _FRESH or user.target in IN_PLACE for user in changed.users)
    if node.target is _BATCH_NORM:
        statistics_given = all(isinstance(argument, Node) for argument in node.args[3:5])
        return statistics_given and node.args[5] is False
    return node.target in _COMMON


def _replace_in_place(graph: Graph, node: Node) -> None:
    """Whatever read the changed value later reads the new one."""
    changed: Any = node.args[0]
    order = {other: index for index, other in enumerate(graph.nodes)}
    place = order[node]
    with graph.inserting_before(node):
        new = graph.call_function(IN_PLACE[node.target], node.args, node.kwargs)
    _take_place(graph, new, node)
    changed.replace_all_uses_with(new, lambda user: user is not new and order[user] > place)


def _replace_batch_norm(graph: Graph, node: Node) -> None:
    """By one scale and shift, see `capture`."""
    x, weight, bias, mean, variance, _, _, eps, *_ = node.args
    shape = [-1] + [1] * (node.meta["val"].ndim - 2)

    def made(target: Any, *args: Any) -> Node:
        new = graph.call_function(target, args)
        new.meta["val"] = target(*map_arg(args, lambda argument: argument.meta["val"]))
        return new

    with graph.inserting_before(node):
        scale = made(aten.rsqrt.default, made(aten.add.Tensor, variance, eps))
        if weight is not None:
            scale = made(aten.mul.Tensor, scale, weight)
        shift = made(aten.mul.Tensor, made(aten.neg.default, mean), scale)
        if bias is not None:
            shift = made(aten.add.Tensor, shift, bias)
        shift, scale = (made(aten.view.default, part, shape) for part in (shift, scale))
        new = graph.call_function(aten.addcmul.default, (shift, x, scale))
    _take_place(graph, new, node)


def _take_place(graph: Graph, new: Node, node: Node) -> None:
    """Its name, too: the program's signature knows outputs by name."""
    new.meta, name = dict(node.meta), node.name
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    new.name = name
