"""What each node of the captured graph is: the one place that names ATen operators.

The paper counts the outputs of convolution, linear, attention and activation operations (and layer norms in
transformers); batch norm, additions and pooling are absorbed in the operation that follows them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

aten = torch.ops.aten


def _overloads(*names: str) -> frozenset[Any]:
    """Every overload of the named ATen operators that this torch has."""
    packets = [getattr(aten, name) for name in names if hasattr(aten, name)]
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


CONVOLUTION = _overloads("conv1d", "conv2d", "conv3d")
PLAIN_CONVOLUTION = frozenset({aten.conv1d.default, aten.conv2d.default, aten.conv3d.default})  # padding in numbers
TRANSPOSED_CONVOLUTION = _overloads("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
LINEAR = _overloads("linear")
FUSED_ATTENTION = _overloads("scaled_dot_product_attention")
PRODUCT = _overloads("matmul", "bmm", "mm", "addmm", "baddbmm", "einsum")
BILINEAR = _overloads("bilinear")
RECURRENT = _overloads("lstm", "gru", "rnn_tanh", "rnn_relu")
SOFTMAX = _overloads("softmax", "_softmax", "_safe_softmax")
RELU = _overloads("relu")
RECTIFIER = _overloads("relu", "relu6", "hardtanh", "leaky_relu", "clamp", "clamp_min", "prelu", "threshold")
CURVED_ACTIVATION = _overloads(
    "gelu", "silu", "hardswish", "hardsigmoid", "sigmoid", "tanh", "elu", "celu", "selu", "mish", "softplus",
    "log_sigmoid", "glu",
)  # fmt: skip
EMBEDDING = _overloads("embedding")
ADDITION = _overloads("add")
LAYER_NORM = _overloads("layer_norm", "native_layer_norm", "rms_norm")

_COUNTED = CONVOLUTION | TRANSPOSED_CONVOLUTION | LINEAR | FUSED_ATTENTION | RECTIFIER | CURVED_ACTIVATION | LAYER_NORM

# Shape only: the values pass through unchanged.
SHAPE = _overloads(
    "view", "_unsafe_view", "reshape", "transpose", "permute", "t", "flatten", "unflatten", "squeeze", "unsqueeze",
    "expand", "select", "slice", "split", "split_with_sizes", "chunk", "unbind", "clone", "contiguous", "alias",
    "detach", "_to_copy", "to", "dropout", "narrow", "roll", "flip", "movedim", "repeat", "pixel_shuffle",
    "pixel_unshuffle", "index_select", "lift_fresh_copy", "cat", "stack", "unfold",
) | {operator.getitem}  # fmt: skip

# Linear, or linear in pieces, in each varying argument taken together with the others.
_LINEAR_PIECES = (
    SHAPE
    | RECTIFIER
    | _overloads(
        "add", "sub", "neg", "sum", "mean", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
        "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "max_pool1d",
        "max_pool2d", "max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d",
        "amax", "maximum", "minimum", "abs", "pad", "constant_pad_nd", "upsample_nearest2d", "upsample_bilinear2d",
        "zeros_like",
    )
)  # fmt: skip

# Each element of the output a function of one element of the input.
ELEMENTWISE = (RECTIFIER | CURVED_ACTIVATION) - _overloads("prelu", "glu")
IN_PLACE = {  # and what gives the same as a new value
    getattr(packet, name): getattr(getattr(aten, op), name)
    for op in ("relu", "relu6", "hardtanh", "leaky_relu", "silu", "hardswish", "elu", "celu", "selu", "mish", "add")
    if (packet := getattr(aten, f"{op}_", None)) is not None
    for name in packet.overloads()
    if hasattr(getattr(aten, op), name)
}
SHIFT_AND_SCALE = frozenset({aten.addcmul.default})  # what batch norms are captured as
SCALING = frozenset({aten.mul.Tensor, aten.mul.Scalar})
# Linear where every tensor they read varies.
LINEAR_ALONE = SHAPE - {operator.getitem} | _overloads(
    "sum", "mean", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "upsample_nearest2d", "upsample_bilinear2d",
)  # fmt: skip
HOLDING_NOTHING = ADDITION | SHIFT_AND_SCALE | SCALING | LINEAR_ALONE | {operator.getitem}  # to be differentiated

# Linear in one argument while the others stay fixed.
_LINEAR_IN_ONE = CONVOLUTION | TRANSPOSED_CONVOLUTION | LINEAR | PRODUCT | _overloads("mul", "addcmul")


def is_attention_product(node: Node) -> bool:
    """Attention written out: the product of softmaxed scores with the values."""

    def from_softmax(value: Any) -> bool:
        while isinstance(value, Node) and value.target in SHAPE and value.args:
            value = value.args[0]
        return isinstance(value, Node) and value.target in SOFTMAX

    return node.target in PRODUCT and any(from_softmax(argument) for argument in node.all_input_nodes)


def is_attention(node: Node) -> bool:
    return node.target in FUSED_ATTENTION or is_attention_product(node)


def is_counted(node: Node) -> bool:
    """Whether the paper would count the node's output as an operation, before attention claims its projections."""
    return node.target in _COUNTED or is_attention_product(node)


def is_piecewise_linear(node: Node, varying: set[Node]) -> bool:
    """Whether the node's output is a piecewise linear function of its varying inputs.

    Only then (in every node of a segment) is the Hessian of the K-step loss equal to Gauss-Newton almost everywhere.
    """
    if node.target in _LINEAR_PIECES:
        return True
    arguments = pytree.tree_leaves((node.args, node.kwargs))  # a product of a value with itself has it twice
    moving = [argument for argument in arguments if isinstance(argument, Node) and argument in varying]
    if node.target in _LINEAR_IN_ONE:
        return len(moving) <= 1
    if node.target in _overloads("div"):
        return moving == [node.args[0]]
    return False
