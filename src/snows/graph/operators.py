"""What each ATen operation means for pruning: one table, one row for each operation.

To add an operation, add its row to `OPERATORS`. A key is the name of an ATen operation, which covers all of its
overloads, or `name.overload` for one overload that differs. An operation without a row is not counted, is taken to be
curved, is differentiated by autograd, and lets no channel move.

The paper counts the outputs of convolutions, linear layers, attention and activations (in transformers also of layer
norms). Batch norm, additions and pooling belong to the operation that follows them.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils import _pytree as pytree

aten = torch.ops.aten


class Family(Enum):
    """Operations that some rule looks for by name."""

    CONVOLUTION = auto()
    TRANSPOSED_CONVOLUTION = auto()
    LINEAR = auto()
    ATTENTION = auto()  # as one fused operation
    PRODUCT = auto()  # of matrices
    BILINEAR = auto()
    RECURRENT = auto()
    SOFTMAX = auto()
    EMBEDDING = auto()
    ADDITION = auto()
    OTHER = auto()


class Linear(Enum):
    """When the output is a linear, or piecewise linear, function of the arguments that vary."""

    NEVER = auto()
    ALWAYS = auto()  # however many arguments vary
    ONE_VARIES = auto()  # a product: linear in one argument while the others are fixed
    FIRST_VARIES = auto()  # a quotient: linear in the numerator


class Holds(Enum):
    """What has to stay in memory for derivatives."""

    NOTHING = auto()
    SLOPES = auto()  # one number for each element of the output
    FACTORS = auto()  # every argument that a varying argument is multiplied with
    EVERYTHING = auto()  # whatever autograd saves


class Derivative(Enum):
    """Which rule of `chain` gives the derivative."""

    AUTOGRAD = auto()
    CONVOLUTION = auto()
    LINEAR = auto()
    ADDITION = auto()
    SCALE_AND_SHIFT = auto()
    SCALE = auto()
    RELU = auto()
    ELEMENTWISE = auto()  # each element of the output is a function of one element of the input
    LINEAR_MAP = auto()  # the operation is its own derivative


class Channels(Enum):
    """Which rule of `channels` follows channels from the inputs to the output."""

    FIXED = auto()  # none may move
    SAME = auto()  # treats all channels the same way; operands are aligned at their last axes
    LAYER = auto()
    RESHAPE = auto()
    PERMUTE = auto()
    REDUCE = auto()
    PICK = auto()
    CAT = auto()
    WINDOW = auto()  # mixes the positions in the last axes, as many as `window_axes`
    PAD = auto()
    PRELU = auto()
    EMBEDDING = auto()
    ITEM = auto()  # one of the values that an operation returns


class Memory(Enum):
    """Where the output is, compared with the inputs."""

    UNKNOWN = auto()
    NEW = auto()  # always in memory of its own
    SHARED = auto()  # perhaps in an input's memory


@dataclass(frozen=True)
class Operator:
    """What one operation means for pruning."""

    family: Family = Family.OTHER
    counted: bool = False  # whether K counts its output
    linear: Linear = Linear.NEVER
    products: bool = False  # its flops are those of its products, not one for each element of the output
    holds: Holds = Holds.EVERYTHING
    derivative: Derivative = Derivative.AUTOGRAD
    channels: Channels = Channels.FIXED
    window_axes: int = 0
    memory: Memory = Memory.UNKNOWN
    in_place: bool = False  # whether `name_` writes the same result into the first argument
    shape_only: bool = False  # values pass through unchanged, at other places


UNKNOWN = Operator()

_CONVOLUTION = Operator(
    Family.CONVOLUTION, counted=True, linear=Linear.ONE_VARIES, products=True, holds=Holds.FACTORS,
    derivative=Derivative.CONVOLUTION, channels=Channels.LAYER, memory=Memory.NEW,
)  # fmt: skip
_PADDED_BY_NAME = replace(_CONVOLUTION, derivative=Derivative.AUTOGRAD)  # padding="same"
_TRANSPOSED = Operator(Family.TRANSPOSED_CONVOLUTION, counted=True, linear=Linear.ONE_VARIES, products=True)
_PRODUCT = Operator(Family.PRODUCT, linear=Linear.ONE_VARIES, products=True)
_RECURRENT = Operator(Family.RECURRENT)
_SOFTMAX = Operator(Family.SOFTMAX, channels=Channels.SAME)
_ACTIVATION = Operator(
    counted=True, holds=Holds.SLOPES, derivative=Derivative.ELEMENTWISE, channels=Channels.SAME, memory=Memory.NEW
)
_RECTIFIER = replace(_ACTIVATION, linear=Linear.ALWAYS)
_FUNCTION = Operator(channels=Channels.SAME)  # of each element, or of a few operands element by element
_PIECEWISE_FUNCTION = replace(_FUNCTION, linear=Linear.ALWAYS)
_LINEAR_MAP = Operator(linear=Linear.ALWAYS, holds=Holds.NOTHING, derivative=Derivative.LINEAR_MAP)
_SHAPE = replace(_LINEAR_MAP, shape_only=True)
_COPY = replace(_SHAPE, channels=Channels.SAME)
_RESHAPE = replace(_SHAPE, channels=Channels.RESHAPE)
_PERMUTE = replace(_SHAPE, channels=Channels.PERMUTE)
_PICK = replace(_SHAPE, channels=Channels.PICK)
_REDUCE = replace(_LINEAR_MAP, channels=Channels.REDUCE)
_PAD = Operator(linear=Linear.ALWAYS, channels=Channels.PAD)  # not a linear map: the padding may be any constant


def _window(axes: int, derivative: Derivative = Derivative.LINEAR_MAP, memory: Memory = Memory.UNKNOWN) -> Operator:
    """Pooling, interpolation and padding: channels stay apart, positions are mixed."""
    return Operator(
        linear=Linear.ALWAYS, holds=Holds.NOTHING if derivative is Derivative.LINEAR_MAP else Holds.EVERYTHING,
        derivative=derivative, channels=Channels.WINDOW, window_axes=axes, memory=memory,
    )  # fmt: skip


_BY_AUTOGRAD = Derivative.AUTOGRAD

OPERATORS: dict[str, Operator] = {
    # Layers
    "conv1d": _CONVOLUTION,
    "conv2d": _CONVOLUTION,
    "conv3d": _CONVOLUTION,
    "conv1d.padding": _PADDED_BY_NAME,
    "conv2d.padding": _PADDED_BY_NAME,
    "conv3d.padding": _PADDED_BY_NAME,
    "linear": replace(_CONVOLUTION, family=Family.LINEAR, derivative=Derivative.LINEAR),
    "conv_transpose1d": _TRANSPOSED,
    "conv_transpose2d": _TRANSPOSED,
    "conv_transpose3d": _TRANSPOSED,
    "bilinear": Operator(Family.BILINEAR),
    "lstm": _RECURRENT,
    "gru": _RECURRENT,
    "rnn_tanh": _RECURRENT,
    "rnn_relu": _RECURRENT,
    "embedding": Operator(Family.EMBEDDING, channels=Channels.EMBEDDING),
    # Attention, and what it is made of
    "scaled_dot_product_attention": Operator(Family.ATTENTION, counted=True, products=True),
    "matmul": _PRODUCT,
    "bmm": _PRODUCT,
    "mm": _PRODUCT,
    "addmm": _PRODUCT,
    "baddbmm": _PRODUCT,
    "einsum": _PRODUCT,
    "softmax": _SOFTMAX,
    "_softmax": _SOFTMAX,
    "_safe_softmax": _SOFTMAX,
    # Activations
    "relu": replace(_RECTIFIER, derivative=Derivative.RELU, in_place=True),
    "relu6": replace(_RECTIFIER, in_place=True),
    "hardtanh": replace(_RECTIFIER, in_place=True),
    "leaky_relu": replace(_RECTIFIER, in_place=True),
    "clamp": _RECTIFIER,
    "clamp_min": _RECTIFIER,
    "threshold": _RECTIFIER,
    "prelu": Operator(counted=True, linear=Linear.ALWAYS, channels=Channels.PRELU),
    "gelu": _ACTIVATION,
    "silu": replace(_ACTIVATION, in_place=True),
    "hardswish": replace(_ACTIVATION, in_place=True),
    "sigmoid": _ACTIVATION,
    "tanh": _ACTIVATION,
    "elu": replace(_ACTIVATION, in_place=True),
    "celu": replace(_ACTIVATION, in_place=True),
    "selu": replace(_ACTIVATION, in_place=True),
    "mish": replace(_ACTIVATION, in_place=True),
    "softplus": _ACTIVATION,
    "log_sigmoid": _ACTIVATION,
    "glu": Operator(counted=True),
    # Norms
    "layer_norm": Operator(counted=True, channels=Channels.SAME),
    "rms_norm": Operator(counted=True, channels=Channels.SAME),
    "native_layer_norm": Operator(counted=True),
    "batch_norm": Operator(memory=Memory.NEW),  # becomes an addcmul, see `functional`
    # Arithmetic
    "add": Operator(
        Family.ADDITION, linear=Linear.ALWAYS, holds=Holds.NOTHING, derivative=Derivative.ADDITION,
        channels=Channels.SAME, memory=Memory.NEW, in_place=True,
    ),
    "mul": Operator(
        linear=Linear.ONE_VARIES, holds=Holds.FACTORS, derivative=Derivative.SCALE, channels=Channels.SAME,
        memory=Memory.NEW,
    ),
    "addcmul": Operator(
        linear=Linear.ONE_VARIES, holds=Holds.FACTORS, derivative=Derivative.SCALE_AND_SHIFT, channels=Channels.SAME
    ),
    "div": replace(_FUNCTION, linear=Linear.FIRST_VARIES),
    "sub": _PIECEWISE_FUNCTION,
    "rsub": _PIECEWISE_FUNCTION,
    "neg": _PIECEWISE_FUNCTION,
    "abs": _PIECEWISE_FUNCTION,
    "maximum": _PIECEWISE_FUNCTION,
    "minimum": _PIECEWISE_FUNCTION,
    "clamp_max": _PIECEWISE_FUNCTION,
    "pow": _FUNCTION,
    "sqrt": _FUNCTION,
    "rsqrt": _FUNCTION,
    "reciprocal": _FUNCTION,
    "exp": _FUNCTION,
    "log": _FUNCTION,
    "log_softmax": _FUNCTION,
    "_log_softmax": _FUNCTION,
    "zeros_like": Operator(linear=Linear.ALWAYS),
    # Reductions
    "sum": _REDUCE,
    "mean": replace(_REDUCE, memory=Memory.NEW),
    "amax": Operator(linear=Linear.ALWAYS, channels=Channels.REDUCE),
    # Shape only
    "view": _RESHAPE,
    "_unsafe_view": _RESHAPE,
    "reshape": _RESHAPE,
    "flatten": replace(_RESHAPE, memory=Memory.SHARED),
    "squeeze": _RESHAPE,
    "unsqueeze": _RESHAPE,
    "permute": _PERMUTE,
    "transpose": _PERMUTE,
    "t": _PERMUTE,
    "select": _PICK,
    "slice": _PICK,
    "cat": replace(_SHAPE, channels=Channels.CAT, memory=Memory.NEW),
    "clone": _COPY,
    "contiguous": _COPY,
    "alias": _COPY,
    "_to_copy": _COPY,
    "to": _COPY,
    "dropout": _COPY,
    "lift_fresh_copy": _COPY,
    "expand": _COPY,
    "unflatten": _SHAPE,
    "split": _SHAPE,
    "split_with_sizes": _SHAPE,
    "chunk": _SHAPE,
    "unbind": _SHAPE,
    "narrow": _SHAPE,
    "roll": _SHAPE,
    "flip": _SHAPE,
    "movedim": _SHAPE,
    "repeat": _SHAPE,
    "pixel_shuffle": _SHAPE,
    "pixel_unshuffle": _SHAPE,
    "index_select": _SHAPE,
    "stack": _SHAPE,
    "unfold": _SHAPE,
    # Python's, to take one of several values: it is differentiated with the operation that returns them.
    "getitem": replace(_SHAPE, derivative=_BY_AUTOGRAD, channels=Channels.ITEM),
    # Windows
    "pad": replace(_PAD, memory=Memory.SHARED),
    "constant_pad_nd": _PAD,
    **{f"{kind}_pad{n}d": _window(n, _BY_AUTOGRAD) for kind in ("reflection", "replication") for n in (1, 2, 3)},
    **{f"avg_pool{n}d": _window(n, memory=Memory.NEW) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": _window(n, memory=Memory.NEW) for n in (1, 2, 3)},
    **{f"_adaptive_avg_pool{n}d": _window(n) for n in (2, 3)},
    **{f"max_pool{n}d": _window(n, _BY_AUTOGRAD, Memory.NEW) for n in (1, 2, 3)},
    **{f"max_pool{n}d_with_indices": _window(n, _BY_AUTOGRAD) for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": _window(n, _BY_AUTOGRAD) for n in (1, 2, 3)},
    **{f"upsample_nearest{n}d": _window(n) for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": _window(n) for n in (1, 2, 3)},
    "upsample_linear1d": _window(1),
    "upsample_bilinear2d": _window(2),
    "upsample_bicubic2d": _window(2),
    "upsample_trilinear3d": _window(3),
}  # fmt: skip


def operator_of(node: Node) -> Operator:
    """The row of the operation that a node calls."""
    if node.target is operator.getitem:
        return OPERATORS["getitem"]
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return UNKNOWN
    name, overload = _name_and_overload(node.target)
    return OPERATORS.get(f"{name}.{overload}") or OPERATORS.get(name, UNKNOWN)


def out_of_place(node: Node) -> OpOverload | None:
    """The operation that returns what this in-place operation writes into its first argument, if the table has one."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return None
    name, overload = _name_and_overload(node.target)
    row = OPERATORS.get(name.removesuffix("_"), UNKNOWN) if name.endswith("_") else UNKNOWN
    packet = getattr(aten, name.removesuffix("_")) if row.in_place else None
    return getattr(packet, overload, None)


def _name_and_overload(target: OpOverload) -> tuple[str, str]:
    _, name, overload = str(target).split(".")  # aten.conv2d.default
    return name, overload


def is_layer(node: Node) -> bool:
    """Whether the node multiplies its input with a weight, as a convolution or a linear layer does."""
    return operator_of(node).family in (Family.CONVOLUTION, Family.LINEAR)


def is_attention(node: Node) -> bool:
    """Whether the node is an attention: one fused operation, or the product of softmaxed scores with the values."""
    return operator_of(node).family is Family.ATTENTION or softmax_of(node) is not None


def softmax_of(node: Node) -> Node | None:
    """In attention that is written out: the softmax that the values are multiplied with."""
    if operator_of(node).family is not Family.PRODUCT:
        return None
    sources = (_source(argument) for argument in node.all_input_nodes)
    return next((source for source in sources if operator_of(source).family is Family.SOFTMAX), None)


def _source(node: Node) -> Node:
    """Where the values of a node come from, before operations that only change their shape."""
    while operator_of(node).shape_only and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def is_counted(node: Node) -> bool:
    """Whether the paper counts the node's output as an operation.

    A projection is counted here even if it only feeds an attention; see `graph`.
    """
    return operator_of(node).counted or softmax_of(node) is not None


def is_piecewise_linear(node: Node, varying: Collection[Node]) -> bool:
    """Whether the node's output is a piecewise linear function of its varying inputs.

    If this holds for every node of a segment, the Hessian of the K-step loss equals Gauss-Newton almost everywhere.
    """
    linear = operator_of(node).linear
    moving = [argument for argument in arguments_of(node) if argument in varying]
    if linear is Linear.ONE_VARIES:
        return len(moving) <= 1
    if linear is Linear.FIRST_VARIES:
        return moving == [node.args[0]]
    return linear is Linear.ALWAYS


def arguments_of(node: Node) -> list[Node]:
    """The values a node reads, each as often as it is read: a product of a value with itself has it twice."""
    return [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, Node)]


def argument_of(node: Node, position: int, name: str = "", default: Any = None) -> Any:
    """An argument of a node, which may be given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def returned_with_others(node: Node) -> Node | None:
    """If the node is one of several values that an operation returns: the node of that operation."""
    parent = node.args[0] if node.target is operator.getitem else None
    return parent if isinstance(parent, Node) and isinstance(parent.meta["val"], tuple | list) else None


def sizes_of(node: Node) -> list[Any]:
    """The sizes of a node's tensor: integers, and expressions in the number of samples. [] if it is no such tensor."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return []
    return [size.node.expr if isinstance(size, SymInt) else size for size in value.shape]
