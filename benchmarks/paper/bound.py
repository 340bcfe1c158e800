"""The error bound of the appendix (Dong et al. 2017), beside the measured error.

It holds for layers without biases, batch norm and shortcuts. Such a network is trained here: four linear layers with
ReLU on images of clothes, without biases. With N samples and the pruned weights W,

    error = ||Y - Y_pruned||_F / sqrt(N)  <=  sum over layers l of sqrt(dE_l) * prod over later layers r of ||W_r||_F,

where dE_l is the mean squared error of layer l's outputs if it reads what the dense network gives it.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from sections import Row, Section
from torch import Tensor, nn

import snows
from snows.data import embedded

from .setting import Entry, Setting
from .tables import table

_WIDTHS = (784, 256, 128, 64, 10)
_EPOCHS, _SAMPLES = 12, 1000
_SPARSITIES = (0.5, 0.7, 0.9)
_WEIGHTS: dict[str, Literal["newton"] | None] = {"magnitude": None, "snows": "newton"}


def rows(setting: Setting) -> Section:
    network = _trained(2 if setting.quick else _EPOCHS)
    x = embedded.images()[0][: setting.count(_SAMPLES)].flatten(1)
    for sparsity in setting.choose(_SPARSITIES, (0.7,)):
        for name, solver in _WEIGHTS.items():
            measure = partial(_measure, network, x, sparsity, solver)
            yield {"sparsity": sparsity, "weights": name, "samples": len(x)}, measure


def _measure(network: nn.Module, x: Tensor, sparsity: float, solver: Literal["newton"] | None) -> Row:
    pruned = snows.prune(network, x, str(sparsity), layers="*", solver=solver, progress=False).model
    return {"bound": bound(network, pruned, x), "error": error(network, pruned, x)}


@torch.no_grad()
def error(dense: nn.Module, pruned: nn.Module, x: Tensor) -> float:
    return float((dense(x) - pruned(x)).double().norm() / len(x) ** 0.5)


@torch.no_grad()
def bound(dense: nn.Module, pruned: nn.Module, x: Tensor) -> float:
    """The right-hand side above, in double precision."""
    weights = [(a.weight.double(), b.weight.double()) for a, b in _layers(dense, pruned)]
    after = [1.0]  # products of the norms of later layers
    for _, weight in reversed(weights[1:]):
        after.insert(0, after[0] * float(weight.norm()))
    total, inputs = 0.0, x.double()
    for (old, new), factor in zip(weights, after, strict=True):
        own = (inputs @ old.T - inputs @ new.T).norm() / len(x) ** 0.5
        total += float(own) * factor
        inputs = (inputs @ old.T).relu()
    return total


def _layers(dense: nn.Module, pruned: nn.Module) -> list[tuple[nn.Linear, nn.Linear]]:
    pairs = zip(dense.modules(), pruned.modules(), strict=True)
    return [(a, b) for a, b in pairs if isinstance(a, nn.Linear) and isinstance(b, nn.Linear)]


def _trained(epochs: int) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(_WIDTHS):
        parts += [nn.Linear(inputs, outputs, bias=False), nn.ReLU()]
    model = nn.Sequential(*parts[:-1])
    x, y, _, _ = embedded.images()
    x = x.flatten(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(100):
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    return model.eval()


def make_table(found: list[Row]) -> str:
    words = {"magnitude": "magnitude mask", "snows": "SNOWS"}
    body = [
        [f"{r['sparsity']}", words[r["weights"]], r["bound"], r["error"], f"{r['bound'] / r['error']:.0f}"]
        for r in found
    ]
    return table(["sparsity", "weights", "bound", "error", "bound / error"], body)


ENTRY = Entry("bound", "Error bound of the appendix", rows, minutes=1, gib=1, table=make_table)
