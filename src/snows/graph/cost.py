"""What the operations of a graph take: bytes of their values, floating-point operations, bytes held for derivatives.

Everything is for one sample.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Node, map_arg
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from .derivatives import has_rule
from .operators import Holds, operator_of, returned_with_others


@dataclass(frozen=True)
class Cost:
    """What one pass over a segment takes for one sample."""

    bytes: int  # of all values that vary with the layers' weights
    output_bytes: int  # of operations 0 … K
    prelude_bytes: int  # of the values that are computed beforehand
    input_bytes: int  # of the values the segment starts from
    slope_bytes: int  # of what the Jacobian holds
    largest_bytes: int  # of the largest varying value
    flops: int


def cost_of(body: Sequence[Node], prelude: Sequence[Node], targets: Sequence[Node], weights: Iterable[Node]) -> Cost:
    """The cost of a segment: the nodes that vary with some weights, those computed beforehand, and the operations that
    are matched."""
    varying = {*body, *weights}
    inside = {*body, *prelude}
    outside = {a for node in body for a in node.all_input_nodes if a not in inside}
    return Cost(
        bytes=sum(bytes_of(node) for node in body),
        output_bytes=sum(bytes_of(node) for node in targets),
        prelude_bytes=sum(bytes_of(node) for node in prelude),
        input_bytes=sum(bytes_of(node) for node in outside),
        slope_bytes=sum(held_bytes(node, varying) for node in body),
        largest_bytes=max(bytes_of(node) for node in body),
        flops=sum(node.meta["flops"] for node in body),
    )


def bytes_of(node: Node) -> int:
    """Bytes of a node's value for one sample. Parameters are the same for all samples and count nothing."""
    return int(node.meta.get("bytes", 0))


def held_bytes(node: Node, varying: Collection[Node]) -> int:
    """Bytes that the derivative of a node holds (see `chain`), if these nodes vary."""
    value = node.meta["val"]
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return 0  # a size or a comparison does not vary; of several values, each holds what it needs
    node = returned_with_others(node) or node
    sources = tuple(argument for argument in node.all_input_nodes if argument in varying)
    holds = operator_of(node).holds if has_rule(node, sources) else Holds.EVERYTHING
    match holds:
        case Holds.NOTHING:
            return 0
        case Holds.SLOPES:
            return bytes_of(node)
        case Holds.FACTORS:
            return sum(bytes_of(argument) for argument in node.all_input_nodes if argument not in sources)
        case Holds.EVERYTHING:  # twice: autograd also holds what second derivatives need
            return 2 * sum(bytes_of(each) for each in (node, *sources))


def measure(nodes: Iterable[Node], samples: int) -> None:
    """Note the bytes and flops of each node's value for one sample, from a capture with this many samples."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        for node in nodes:
            values = [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
            sizes = [math.prod(_shape(value)) for value in values]
            flops = _products(node, counter) or sum(sizes)
            node.meta["flops"] = flops // samples
            node.meta["bytes"] = sum(
                math.ceil(size * value.element_size() / samples) for size, value in zip(sizes, values, strict=True)
            )


def _products(node: Node, counter: FlopCounterMode) -> int:
    """Flops of the products in a node, two for each multiplication. 0 if it has none."""
    if not operator_of(node).products:
        return 0
    target: Any = node.target
    before = counter.get_total_flops()
    args, kwargs = map_arg((node.args, node.kwargs), lambda a: pytree.tree_map(_meta, a.meta["val"]))
    target(*args, **kwargs)
    return counter.get_total_flops() - before


def _meta(value: Any) -> Any:
    """A tensor of the same size without data; symbolic sizes become those of the capture."""
    if isinstance(value, Tensor):
        return torch.empty(_shape(value), dtype=value.dtype, device="meta")
    return _size(value) if isinstance(value, SymInt) else value


def _shape(value: Tensor) -> list[int]:
    return [_size(size) for size in value.shape]


def _size(size: int | SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)
