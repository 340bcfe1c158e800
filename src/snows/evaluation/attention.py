"""Where a vision transformer's class token looks: its attention to the patches, in the last attention."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from ..caller import own_surroundings
from ..data.preparation import Prepared, prepare
from ..data.usable import require_module
from ..devices.device import device_of
from ..errors import InputError
from ..graph import Graph
from ..graph.operators import Family, is_attention, operator_of, softmax_of

_MOST_PREFIX_TOKENS = 16  # class, distillation and register tokens


def attention_map(model: nn.Module, image: Tensor) -> Tensor:
    """Show how the class token spreads its attention over the patches, in the last attention of a vision transformer.

    Args:
        model: A vision transformer whose class token comes first. The attention is found in the captured graph: it may
            be one fused operation, or products around a softmax.
        image: One image as the model takes it, channels x height x width.

    Returns:
        Attention weights: heads x rows x columns of patches. The rest up to 1 is the attention of each head to the
        class token and other tokens that are not patches.

    Raises:
        InputError: The image is not one image, the model has no attention, or its tokens are not a grid of patches.
        CaptureError: torch.export cannot capture the model.

    Example:
        >>> import snows, torch
        >>> class Tiny(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.patches = torch.nn.Conv2d(3, 8, 4, stride=4)
        ...         self.token = torch.nn.Parameter(torch.zeros(1, 1, 8))
        ...         self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        ...         self.head = torch.nn.Linear(8, 5)
        ...     def forward(self, x):
        ...         x = torch.cat([self.token.expand(x.shape[0], -1, -1), self.patches(x).flatten(2).mT], 1)
        ...         return self.head(self.attention(x, x, x, need_weights=False)[0][:, 0])
        >>> snows.attention_map(Tiny().eval(), torch.randn(3, 16, 24)).shape
        torch.Size([2, 4, 6])
    """
    require_module(model, "model")
    with own_surroundings(device_of(model)):
        (found,) = attention_of(model, [image])
    return found


def attention_of(model: nn.Module, images: Iterable[Tensor]) -> Iterator[Tensor]:
    """The maps of several images of one size. The model is captured once."""
    prepared: Prepared | None = None
    for image in images:
        batch = image if image.ndim == 4 else image[None]
        if batch.ndim != 4 or len(batch) != 1:
            raise InputError(f"the image has shape {tuple(image.shape)}; expected one: channels x height x width")
        if prepared is None:
            prepared = prepare(model, batch, None, seed=0)
            prepared.compare_at_sizes(1)
        (example,) = prepared.samples.rows(0, 1)
        attentions = [node for node in prepared.graph.nodes if is_attention(node)]
        if not attentions:
            raise InputError(f"{type(model).__name__} has no attention; expected a vision transformer")
        weights = _attention_weights(prepared.graph, attentions[-1], [batch.to(example)])
        tokens = weights.shape[-1]
        rows, columns = _patch_grid(prepared.graph, tokens, (int(batch.shape[2]), int(batch.shape[3])))
        patches = weights[:, 0, tokens - rows * columns :]
        yield patches.reshape(-1, rows, columns).cpu()


def _attention_weights(graph: Graph, attention: Node, inputs: list[Any]) -> Tensor:
    """Of a single sample: heads x tokens that look x tokens that are looked at."""
    softmax = softmax_of(attention)  # None in a fused attention
    wanted = [a for a in attention.all_input_nodes if "position" in a.meta] if softmax is None else [softmax]
    values = {node.name: value for node, value in zip(graph.inputs, inputs, strict=True)}
    with torch.no_grad():
        values |= graph.giving(wanted)(values, graph.parameters)
        if softmax is None:

            def value_of(node: Node) -> Any:
                return values[node.name] if node.name in values else graph.parameters[str(node.meta["parameter"])]

            args: Any = torch.fx.map_arg(attention.args, value_of)
            options: Any = torch.fx.map_arg(attention.kwargs, value_of)
            weights = _fused_weights(*args, **options)
        else:
            weights = values[softmax.name]
    return weights.reshape(-1, *weights.shape[-2:])


def _fused_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The softmax inside scaled_dot_product_attention, which has these parameters."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1)


def _patch_grid(graph: Graph, tokens: int, image: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the patches. They are the last tokens, after at least one other token."""
    convolutions = [node for node in graph.nodes if operator_of(node).family is Family.CONVOLUTION]
    sizes = [node.meta["val"].shape[2:] for node in convolutions]
    grids = {(int(size[0]), int(size[1])) for size in sizes if len(size) == 2}
    for prefix in range(1, _MOST_PREFIX_TOKENS + 1):  # patches cut without a convolution: a grid of the image's shape
        rows = round(math.sqrt(max(tokens - prefix, 0) * image[0] / image[1]))
        if rows and (tokens - prefix) % rows == 0 and rows * image[1] == (tokens - prefix) // rows * image[0]:
            grids.add((rows, (tokens - prefix) // rows))
            break
    fitting = [grid for grid in grids if 1 <= tokens - math.prod(grid) <= _MOST_PREFIX_TOKENS]
    if not fitting:
        raise InputError(
            f"the last attention is over {tokens} tokens, which are no class token and a grid of patches; expected a "
            "vision transformer with a class token"
        )
    return max(fitting, key=math.prod)
