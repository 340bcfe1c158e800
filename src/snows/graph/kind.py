"""The kind of network, from its operations and the shapes of its inputs. Defaults depend on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from .graph import Graph
from .operators import is_attention

_LARGE_IMAGE = 3 * 128 * 128  # numbers in one RGB image of 128 pixels
_SMALLEST_IMAGE = 16  # pixels; anything smaller is no picture


@dataclass(frozen=True)
class NetworkKind:
    """What defaults are chosen by."""

    attention: bool  # transformers
    images: bool  # some input looks like a batch of images
    large_inputs: bool  # a sample of some input is at least as large as an RGB image of 128 pixels
    grouped: bool  # some layer is a grouped or depthwise convolution
    layers: int


def kind_of(graph: Graph) -> NetworkKind:
    """The kind of the network that a graph was captured from."""
    inputs = [value for node in graph.inputs if isinstance(value := node.meta.get("val"), Tensor)]
    return NetworkKind(
        attention=any(is_attention(node) for node in graph.operations),
        images=any(is_image(value) for value in inputs),
        large_inputs=any(math.prod(int(size) for size in value.shape[1:]) >= _LARGE_IMAGE for value in inputs),
        grouped=any(layer.groups > 1 for layer in graph.layers),
        layers=len(graph.layers),
    )


def is_image(value: object) -> bool:
    """Whether an input looks like a batch of images: samples x at most four channels x height x width."""
    if not isinstance(value, Tensor) or value.ndim != 4 or not value.is_floating_point():
        return False
    return value.shape[1] <= 4 and min(value.shape[2:]) >= _SMALLEST_IMAGE
