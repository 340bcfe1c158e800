"""Floating-point operations of a network, dense and sparse, as the paper counts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .graph import Graph
from .operators import operator_of


@dataclass(frozen=True)
class FlopCount:
    """What one sample takes, if every removed weight saves its multiplications. No engine has to reach it.

    Counted are two operations for each multiplication with its addition, in all convolutions, linear layers, attention
    and other products of matrices, pruned or not. Element-wise operations and recurrent layers are not counted.

    dense      of the dense network
    sparse     of the pruned network
    attention  products of two activations, which no mask of weights makes fewer; they are part of both
    """

    dense: int
    sparse: int
    attention: int

    @property
    def reduction(self) -> float:
        """How many times fewer the pruned network takes."""
        return self.dense / self.sparse if self.sparse else 1.0

    @property
    def reduction_without_attention(self) -> float:
        """The same of layers alone."""
        left = self.sparse - self.attention
        return (self.dense - self.attention) / left if left else 1.0

    def to_dict(self) -> dict[str, float]:
        return {
            "dense": self.dense,
            "sparse": self.sparse,
            "attention": self.attention,
            "reduction": self.reduction,
            "reduction_without_attention": self.reduction_without_attention,
        }


@dataclass(frozen=True)
class NetworkFlops:
    """The operations of a dense network for one sample: all, those of attention, and of each layer by its weight."""

    total: int
    attention: int
    layers: Mapping[str, int]

    def sparse(self, kept: Mapping[str, float]) -> FlopCount:
        """What is left if these weights, by parameter name, keep these fractions. The other layers are dense."""
        saved = sum((1 - fraction) * self.layers.get(name, 0) for name, fraction in kept.items())
        return FlopCount(self.total, self.total - round(saved), self.attention)


def network_flops(graph: Graph) -> NetworkFlops:
    """The operations of a captured network, see `FlopCount`.

    For a model and masks: `network_flops(prepare(model, samples, None, 0).graph).sparse(kept)`, with `prepare` of
    `data.preparation`; kept is {name: float(mask.double().mean())}.
    """
    products = [node for node in graph.nodes if operator_of(node).products]
    fixed = {*graph.parameter_nodes}
    between = [node for node in products if not fixed & {*node.all_input_nodes}]
    return NetworkFlops(
        total=sum(node.meta["flops"] for node in products),
        attention=sum(node.meta["flops"] for node in between),
        layers={layer.parameter: layer.node.meta["flops"] for layer in graph.layers if layer.in_graph},
    )
