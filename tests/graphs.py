"""Small graphs built node by node, with any operation: no capture, so they are made in no time.

`CASES` has one call for each row of the table of operators.
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph as FxGraph
from torch.fx import Node, map_arg
from torch.utils import _pytree as pytree

from snows.graph import Graph, Layer
from snows.graph.chain import Chain
from snows.graph.cost import measure
from snows.graph.layers import find_layers

aten = torch.ops.aten
SAMPLES = 11  # a size that nothing else has


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 31 * len(shape)), dtype=torch.float64)


class Builder:
    """Nodes as a capture makes them, with real tensors as their example values."""

    def __init__(self) -> None:
        self.fx = FxGraph()
        self.inputs: list[Node] = []
        self.nodes: list[Node] = []
        self.names: dict[Node, str] = {}
        self.parameters: dict[str, Tensor] = {}

    def input(self, value: Any) -> Node:
        node = self.fx.placeholder(f"x{len(self.inputs)}")
        node.meta["val"] = value
        self.inputs.append(node)
        return node

    def parameter(self, value: Tensor, name: str = "") -> Node:
        node = self.fx.placeholder(f"p{len(self.names)}")
        node.meta["val"] = value
        self.names[node] = name or f"{len(self.names)}.weight"
        self.parameters[self.names[node]] = value
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Tensors among the arguments become parameters."""
        args, kwargs = pytree.tree_map(lambda a: self.parameter(a) if isinstance(a, Tensor) else a, (args, kwargs))
        node = self.fx.call_function(target, args, kwargs)
        node.meta["val"] = self.value(node)
        self.nodes.append(node)
        return node

    def value(self, node: Node, values: dict[Node, Any] | None = None) -> Any:
        """A node's value; other values of what it reads may be given."""
        given = values or {}
        args, kwargs = map_arg((node.args, node.kwargs), lambda a: given.get(a, a.meta["val"]))
        target: Any = node.target
        return target(*args, **kwargs)

    def build(self, *outputs: Node) -> Graph:
        measure([*self.inputs, *self.nodes], SAMPLES)
        for node in self.nodes:
            node.meta["sample_layout"] = None
        layers = find_layers(self.nodes, self.names, self.parameters)
        outputs = outputs or (self.nodes[-1],)
        return Graph(self.inputs, self.nodes, list(outputs), self.names, self.parameters, layers, list(self.parameters))


def layer_of(graph: Graph, parameter: str) -> Layer:
    return next(layer for layer in graph.layers if layer.parameter == parameter)


class _Varying:
    """Stands for the varying argument in a case."""


X = _Varying()


@dataclass(frozen=True)
class Case:
    """One call of an operation with a varying argument."""

    target: Any
    args: tuple[Any, ...] = (X,)
    kwargs: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = (SAMPLES, 4, 6, 6)
    positive: bool = False

    @property
    def x(self) -> Tensor:
        x = random(*self.shape, seed=1)
        return x.abs() + 0.5 if self.positive else x

    def add_to(self, builder: Builder, x: Node) -> Node:
        """The node of the call; of several results, the first."""
        args = pytree.tree_map(lambda a: x if a is X else a, self.args)
        node = builder.call(self.target, *args, **self.kwargs)
        return node if isinstance(node.meta["val"], Tensor) else builder.call(operator.getitem, node, 0)

    def run(self, x: Tensor) -> Tensor:
        args = pytree.tree_map(lambda a: x if a is X else a, self.args)
        value = self.target(*args, **self.kwargs)
        return value if isinstance(value, Tensor) else value[0]


def made(case: Case) -> tuple[Builder, Node, Node]:
    """A graph with this one call; its varying argument, and its result."""
    builder = Builder()
    x = builder.input(case.x)
    return builder, x, case.add_to(builder, x)


def _windows() -> Iterator[tuple[str, Case]]:
    for n in (1, 2, 3):
        shape = (SAMPLES, 4, *(6, 4, 4)[:n])
        two, pads, scales = [2] * n, [1, 0] * n, [2.0] * n
        yield f"avg_pool{n}d", Case(getattr(aten, f"avg_pool{n}d").default, (X, two), shape=shape)
        yield f"max_pool{n}d", Case(getattr(aten, f"max_pool{n}d").default, (X, two), shape=shape)
        indices = getattr(aten, f"max_pool{n}d_with_indices").default
        yield f"max_pool{n}d_with_indices", Case(indices, (X, two), shape=shape)
        for kind in ("avg", "max"):
            pool = getattr(aten, f"adaptive_{kind}_pool{n}d").default
            yield f"adaptive_{kind}_pool{n}d", Case(pool, (X, two), shape=shape)
        for kind in ("reflection", "replication"):
            yield f"{kind}_pad{n}d", Case(getattr(aten, f"{kind}_pad{n}d").default, (X, pads), shape=shape)
        for kind in ("upsample_nearest", "_upsample_nearest_exact"):
            yield f"{kind}{n}d", Case(getattr(aten, f"{kind}{n}d").vec, (X, None, scales), shape=shape)
    for n in (2, 3):
        shape = (SAMPLES, 4, *(6, 4, 4)[:n])
        yield (
            f"_adaptive_avg_pool{n}d",
            Case(getattr(aten, f"_adaptive_avg_pool{n}d").default, (X, [2] * n), shape=shape),
        )


def _smooth(*names: str) -> Iterator[tuple[str, Case]]:
    for name in names:
        yield name, Case(getattr(aten, name).default)


ONE_D, THREE_D, MATRIX, BATCHED = (SAMPLES, 4, 6), (SAMPLES, 4, 3, 3, 3), (SAMPLES, 6), (SAMPLES, 4, 6)
OTHER, VALUES = random(SAMPLES, 4, 6, 6, seed=5), random(SAMPLES, 4, 6, 5)

CASES: dict[str, Case] = {
    "conv1d": Case(aten.conv1d.default, (X, random(5, 4, 3), random(5), [1], [1]), shape=ONE_D),
    "conv2d": Case(aten.conv2d.default, (X, random(6, 2, 3, 3), random(6), [2, 2], [1, 1], [1, 1], 2)),
    "conv3d": Case(aten.conv3d.default, (X, random(5, 4, 2, 2, 2)), shape=THREE_D),
    "conv1d.padding": Case(aten.conv1d.padding, (X, random(5, 4, 3), None, [1], "same"), shape=ONE_D),
    "conv2d.padding": Case(aten.conv2d.padding, (X, random(5, 4, 3, 3), random(5), [1], "same")),
    "conv3d.padding": Case(aten.conv3d.padding, (X, random(5, 4, 3, 3, 3), None, [1], "same"), shape=THREE_D),
    "linear": Case(aten.linear.default, (X, random(5, 6), random(5))),
    "conv_transpose1d": Case(aten.conv_transpose1d.default, (X, random(4, 5, 3)), shape=ONE_D),
    "conv_transpose2d": Case(aten.conv_transpose2d.input, (X, random(4, 5, 2, 2), None, [2, 2])),
    "conv_transpose3d": Case(aten.conv_transpose3d.input, (X, random(4, 5, 2, 2, 2)), shape=THREE_D),
    "bilinear": Case(aten.bilinear.default, (X, random(SAMPLES, 5), random(2, 6, 5)), shape=MATRIX),
    "embedding": Case(aten.embedding.default, (X, torch.tensor([[2, 0], [1, 1]])), shape=(SAMPLES, 4)),
    "scaled_dot_product_attention": Case(aten.scaled_dot_product_attention.default, (X, OTHER, VALUES)),
    "matmul": Case(aten.matmul.default, (X, random(6, 5))),
    "bmm": Case(aten.bmm.default, (X, random(SAMPLES, 6, 5)), shape=BATCHED),
    "mm": Case(aten.mm.default, (X, random(6, 5)), shape=MATRIX),
    "addmm": Case(aten.addmm.default, (random(5), X, random(6, 5)), shape=MATRIX),
    "baddbmm": Case(aten.baddbmm.default, (random(5), X, random(SAMPLES, 6, 5)), shape=BATCHED),
    "einsum": Case(aten.einsum.default, ("bcij,jk->bcik", [X, random(6, 5)])),
    "softmax": Case(aten.softmax.int, (X, -1)),
    "_softmax": Case(aten._softmax.default, (X, -1, False)),
    "_safe_softmax": Case(aten._safe_softmax.default, (X, -1)),
    "relu": Case(aten.relu.default),
    "relu6": Case(aten.relu6.default),
    "hardtanh": Case(aten.hardtanh.default),
    "leaky_relu": Case(aten.leaky_relu.default, (X, 0.2)),
    "clamp": Case(aten.clamp.default, (X, -0.3, 0.4)),
    "clamp_min": Case(aten.clamp_min.default, (X, -0.3)),
    "clamp_max": Case(aten.clamp_max.default, (X, 0.4)),
    "threshold": Case(aten.threshold.default, (X, 0.1, 0.5)),
    "prelu": Case(aten.prelu.default, (X, random(4))),
    **dict(_smooth("gelu", "silu", "hardswish", "sigmoid", "tanh", "elu", "celu", "selu", "mish", "softplus")),
    "log_sigmoid": Case(aten.log_sigmoid.default),
    "glu": Case(aten.glu.default, (X, 1)),
    "layer_norm": Case(aten.layer_norm.default, (X, [6], random(6), random(6, seed=1))),
    "rms_norm": Case(aten.rms_norm.default, (X, [6], random(6))),
    "native_layer_norm": Case(aten.native_layer_norm.default, (X, [6], random(6), random(6, seed=1), 1e-5)),
    "add": Case(aten.add.Tensor, (X, OTHER)),
    "mul": Case(aten.mul.Tensor, (X, random(4, 1, 1))),
    "addcmul": Case(aten.addcmul.default, (random(4, 1, 1), X, random(4, 1, 1, seed=1))),
    "div": Case(aten.div.Tensor, (X, OTHER)),
    "sub": Case(aten.sub.Tensor, (X, OTHER)),
    "rsub": Case(aten.rsub.Tensor, (X, OTHER)),
    "neg": Case(aten.neg.default),
    "abs": Case(aten.abs.default),
    "maximum": Case(aten.maximum.default, (X, OTHER)),
    "minimum": Case(aten.minimum.default, (X, OTHER)),
    "pow": Case(aten.pow.Tensor_Scalar, (X, 3)),
    "sqrt": Case(aten.sqrt.default, positive=True),
    "rsqrt": Case(aten.rsqrt.default, positive=True),
    "reciprocal": Case(aten.reciprocal.default, positive=True),
    "exp": Case(aten.exp.default),
    "log": Case(aten.log.default, positive=True),
    "log_softmax": Case(aten.log_softmax.int, (X, -1)),
    "_log_softmax": Case(aten._log_softmax.default, (X, -1, False)),
    "zeros_like": Case(aten.zeros_like.default),
    "sum": Case(aten.sum.dim_IntList, (X, [2])),
    "mean": Case(aten.mean.dim, (X, [2, 3], True)),
    "amax": Case(aten.amax.default, (X, [3])),
    "view": Case(aten.view.default, (X, [SAMPLES, 4, 36])),
    "_unsafe_view": Case(aten._unsafe_view.default, (X, [SAMPLES, 4, 36])),
    "reshape": Case(aten.reshape.default, (X, [SAMPLES, 4, 36])),
    "flatten": Case(aten.flatten.using_ints, (X, 2)),
    "squeeze": Case(aten.squeeze.default, shape=(SAMPLES, 4, 1, 6)),
    "unsqueeze": Case(aten.unsqueeze.default, (X, -1)),
    "permute": Case(aten.permute.default, (X, [0, 2, 3, 1])),
    "transpose": Case(aten.transpose.int, (X, 1, 3)),
    "t": Case(aten.t.default, shape=MATRIX),
    "select": Case(aten.select.int, (X, 2, 1)),
    "slice": Case(aten.slice.Tensor, (X, 3, 1, 4)),
    "cat": Case(aten.cat.default, ([X, X], 3)),
    "clone": Case(aten.clone.default),
    "contiguous": Case(aten.contiguous.default),
    "alias": Case(aten.alias.default),
    "_to_copy": Case(aten._to_copy.default, kwargs={"dtype": torch.float64}),
    "to": Case(aten.to.dtype, (X, torch.float64)),
    "dropout": Case(aten.dropout.default, (X, 0.5, False)),
    "lift_fresh_copy": Case(aten.lift_fresh_copy.default),
    "expand": Case(aten.expand.default, (X, [SAMPLES, 4, 6, 6]), shape=(SAMPLES, 4, 1, 6)),
    "unflatten": Case(aten.unflatten.int, (X, 3, [2, 3])),
    "split": Case(aten.split.Tensor, (X, 2, 2)),
    "split_with_sizes": Case(aten.split_with_sizes.default, (X, [1, 5], 2)),
    "chunk": Case(aten.chunk.default, (X, 2, 2)),
    "unbind": Case(aten.unbind.int, (X, 2)),
    "narrow": Case(aten.narrow.default, (X, 2, 0, 2)),
    "roll": Case(aten.roll.default, (X, [1], [2])),
    "flip": Case(aten.flip.default, (X, [2])),
    "movedim": Case(aten.movedim.int, (X, 1, 3)),
    "repeat": Case(aten.repeat.default, (X, [1, 1, 2, 1])),
    "pixel_shuffle": Case(aten.pixel_shuffle.default, (X, 2)),
    "pixel_unshuffle": Case(aten.pixel_unshuffle.default, (X, 2)),
    "index_select": Case(aten.index_select.default, (X, 2, torch.tensor([3, 1, 1]))),
    "stack": Case(aten.stack.default, ([X, X], 1)),
    "unfold": Case(aten.unfold.default, (X, 2, 2, 1)),
    "getitem": Case(aten.split.Tensor, (X, 4, 2)),
    "pad": Case(aten.pad.default, (X, [1, 0, 0, 1], "constant", 0.5)),
    "constant_pad_nd": Case(aten.constant_pad_nd.default, (X, [1, 0, 0, 1], 0.5)),
    "upsample_linear1d": Case(aten.upsample_linear1d.vec, (X, None, False, [2.0]), shape=ONE_D),
    "upsample_bilinear2d": Case(aten.upsample_bilinear2d.vec, (X, None, False, [2.0, 2.0])),
    "upsample_bicubic2d": Case(aten.upsample_bicubic2d.vec, (X, None, False, [2.0, 2.0])),
    "upsample_trilinear3d": Case(aten.upsample_trilinear3d.vec, (X, None, False, [2.0, 2.0, 2.0]), shape=THREE_D),
    **dict(_windows()),
}
NEVER_IN_A_GRAPH = {"batch_norm"}  # captured as something else
RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}  # only ever refused


class _Saved:
    """A tensor that autograd holds."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Held:
    """Within it, autograd's own memory is watched: `bytes` counts what a chain that was made within still holds."""

    def __init__(self) -> None:
        self._saved: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._saved.add(saved)
        return saved

    def __enter__(self) -> Held:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def bytes(self, chain: Chain, samples: int) -> int:
        """Of the tensors that have an axis as long as this number of samples: others are the same for all samples."""
        gc.collect(1)  # what was made just now
        tensors = [saved.tensor for saved in self._saved]
        for step in chain._steps:
            tensors += tensors_in(step.push, step.pull)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if samples in t.shape}
        return sum(storages.values())


def tensors_in(*roots: Any) -> list[Tensor]:
    """The tensors that functions hold in their closures."""
    found: list[Tensor] = []
    waiting: list[Any] = list(roots)
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, tuple | list):
            waiting.extend(item)
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif callable(item) and getattr(item, "__closure__", None):
            waiting.extend(cell.cell_contents for cell in item.__closure__)
    return found
