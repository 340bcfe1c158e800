"""Layers that cannot be pruned, each with its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snows.graph import Graph, capture
from tests.networks import captured


class TiedModules(nn.Module):
    """Two modules, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.middle(self.encoder(x)).relu())


class Odd(nn.Module):
    """A transposed convolution, a computed weight, a transformed weight and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(2, 4, 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1))
        self.scaled = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.constant = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.normed(self.up(x)).mean((2, 3))
        x = F.linear(x, 2 * self.scaled.weight)
        return self.head(x + self.constant(torch.ones(4)))


class Matrices(nn.Module):
    """Weights that are used in other ways than as a layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Parameter(torch.randn(4, 4))
        self.computed = nn.Parameter(torch.randn(4, 4))
        self.shift = nn.Parameter(torch.randn(4))
        self.table = nn.Parameter(torch.randn(4, 4))
        self.bilinear = nn.Bilinear(4, 4, 4)
        self.register_buffer("fixed", torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.product + self.shift
        x = torch.einsum("ij,jk->ik", x, self.computed.exp().T)
        x = x + self.table.sum(0)
        return F.linear(self.bilinear(x, x), self.fixed)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell, self.head = kind(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


def refusals(model: nn.Module, *shape: int) -> dict[str, str | None]:
    graph = capture(model.eval(), (torch.randn(3, *shape),), {})
    assert all(layer.in_graph for layer in graph.layers if layer.refusal is None)
    return {layer.name: layer.refusal for layer in graph.layers}


def test_a_weight_used_twice_is_refused_naming_the_places() -> None:
    graph: Graph = captured("tied")[1]
    (twice,) = [layer for layer in graph.layers if layer.name == "twice"]
    assert twice.refusal == "its weight is used in 2 places (twice)"
    assert twice.in_graph
    assert len(twice.uses) == 2
    found = refusals(TiedModules(), 4)
    assert found == {"encoder": "its weight is used in 2 places (decoder, encoder)", "middle": None}


def test_modules_are_refused_with_their_reason() -> None:
    assert refusals(Odd(), 2, 3, 3) == {
        "up": "transposed convolutions are not supported",
        "normed": "its weight is computed from other parameters",
        "scaled": "its weight is transformed before it is used",
        "unused": "forward does not use it",
        "constant": "its input is the same whatever the data, so there is nothing to match",
        "head": None,
    }


def test_a_layer_whose_output_is_thrown_away() -> None:
    class Ignoring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ignored, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.ignored(x)
            return self.head(x)

    assert refusals(Ignoring(), 4) == {"ignored": "the model's output does not depend on it", "head": None}


def test_weights_outside_of_layers_are_refused_with_their_reason() -> None:
    """A vector, and a matrix that the data is not multiplied with, are no layers."""
    assert refusals(Matrices(), 4) == {
        "fixed": "its weight is a buffer, not a parameter",
        "product": "its weight is used in a plain matrix product, not in a linear layer",
        "computed": "its weight is used in a plain matrix product, not in a linear layer",
        "bilinear": "its weight is used in a plain matrix product, not in a linear layer",
    }


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_refused(kind: Any) -> None:
    found = refusals(Recurrent(kind), 5, 4)
    assert found.pop("head") is None
    assert found.keys() >= {"cell.weight_ih_l0", "cell.weight_hh_l0"}
    assert set(found.values()) == {"recurrent layers are not supported"}


def test_a_layer_without_an_operation_says_so() -> None:
    graph = capture(Odd().eval(), (torch.randn(3, 2, 3, 3),), {})
    (unused,) = [layer for layer in graph.layers if layer.name == "unused"]
    assert not unused.in_graph
    with pytest.raises(LookupError, match="unused is no operation of the graph: forward does not use it"):
        unused.position  # noqa: B018
