"""What the class token of a vision transformer looks at: its attention over the patches, in the last attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from ..data.preparation import prepare
from ..errors import InputError
from ..graph import Graph
from ..graph.operators import Family, is_attention, operator_of, softmax_of

_MOST_PREFIX_TOKENS = 16  # class, distillation and register tokens


def attention_map(model: nn.Module, image: Tensor) -> Tensor:
    """How the class token's attention in the last attention is spread over the patches: heads x rows x columns.

    model   any vision transformer whose class token comes first; it is found in the captured graph, so it does not
            matter whether attention is a fused operation or products around a softmax
    image   channels x height x width, as the model takes it

    Each head's shares and what it gives to the class token and its like add up to one.
    """
    batch = image if image.ndim == 4 else image[None]
    if batch.ndim != 4 or len(batch) != 1:
        raise InputError(f"the image has shape {tuple(image.shape)}; expected one: channels x height x width")
    world = prepare(model, batch, None, seed=0)
    attentions = [node for node in world.graph.nodes if is_attention(node)]
    if not attentions:
        raise InputError(f"{type(model).__name__} has no attention; expected a vision transformer")
    leaves = world.samples.rows(0, 1)
    shares = _attention_shares(world.graph, attentions[-1], leaves)  # heads x tokens x tokens
    rows, columns = _patch_grid(world.graph, shares.shape[-1], (int(batch.shape[2]), int(batch.shape[3])))
    patches = shares[:, 0, shares.shape[-1] - rows * columns :]
    return patches.reshape(-1, rows, columns).cpu()


def _attention_shares(graph: Graph, attention: Node, leaves: list[Any]) -> Tensor:
    """What each token takes from each other one, of the only sample: heads x tokens x tokens."""
    softmax = softmax_of(attention)  # None in a fused attention
    wanted = [a for a in attention.all_input_nodes if "position" in a.meta] if softmax is None else [softmax]
    values = {node.name: leaf for node, leaf in zip(graph.inputs, leaves, strict=True)}
    with torch.no_grad():
        values |= graph.giving(wanted)(values, graph.parameters)
        if softmax is None:

            def value_of(node: Node) -> Any:
                return values[node.name] if node.name in values else graph.parameters[str(node.meta["parameter"])]

            args: Any = torch.fx.map_arg(attention.args, value_of)
            options: Any = torch.fx.map_arg(attention.kwargs, value_of)
            shares = _fused_shares(*args, **options)
        else:
            shares = values[softmax.name]
    return shares.reshape(-1, *shares.shape[-2:])


def _fused_shares(
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
    """The softmax inside of scaled_dot_product_attention, whose arguments these are."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1)


def _patch_grid(graph: Graph, tokens: int, image: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the patches, which are the last tokens; at least one token is before them."""
    convolutions = [node for node in graph.nodes if operator_of(node).family is Family.CONVOLUTION]
    sizes = [node.meta["val"].shape[2:] for node in convolutions]
    grids = {(int(size[0]), int(size[1])) for size in sizes if len(size) == 2}
    for prefix in range(1, _MOST_PREFIX_TOKENS + 1):  # where no convolution cuts the patches: those of the image's form
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
