"""CHITA (Benbaki et al. 2023): the quadratic model of the loss under a budget of weights, as sparse regression.

With the gradients as rows of X: min 1/2 |X w - X b|^2 + N damping / 2 |b - w|^2 over b with k entries. Iterative hard
thresholding searches the support; on it the minimum is a ridge regression in closed form. X'X is never formed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import Choice, Network, best_masks, require_unstructured
from .fisher import joint_update, slices

_DOUBLINGS = 20
_LEAST_CHANGE = 1e-7

Support = Callable[[Tensor], Tensor]  # from scores to the mask of those that stay


@dataclass(frozen=True)
class CHITA:
    gradients: int = 1000
    batch: int = 1  # samples behind each gradient
    damping: float = 1e-4
    steps: int = 0  # of iterative hard thresholding; 0: the support of the largest weights
    block: int | None = 500  # weights of a layer that are solved together; None: all of the network

    def choose(self, network: Network) -> Choice:
        require_unstructured(self, network.patterns)
        magnitudes = {name: w.abs() for name, w in network.weights.items()}
        return self.solve_on(best_masks(magnitudes, network.patterns), network)

    def solve_on(self, masks: dict[str, Tensor], network: Network, between_layers: bool = True) -> Choice:
        """From these supports: search for better ones with the same number of weights, then solve on them.

        Where all of the network is solved together, weights may move `between_layers` as far as their patterns allow.
        """
        if self.block is None:
            pairs = dict(network.gradients(self.gradients, self.batch))
            sizes = [network.weights[name].numel() for name in pairs]
            weight = torch.cat([network.weights[name].flatten() for name in pairs])
            kept = torch.cat([masks[name].flatten() for name in pairs])

            def support(score: Tensor) -> Tensor:
                parts = dict(zip(pairs, score.split(sizes), strict=True))
                if between_layers:
                    return torch.cat(list(best_masks(parts, network.patterns).values()))
                return torch.cat([_largest(part, int(masks[name].sum())) for name, part in parts.items()])

            solved = _solve(torch.cat(list(pairs.values()), dim=1), weight, kept, self.damping, self.steps, support)
            parts = zip(*(part.split(sizes) for part in solved), strict=True)
            found = dict(zip(pairs, parts, strict=True))
        else:
            found = {}
            for name, x in network.gradients(self.gradients, self.batch):
                w, k = network.weights[name].flatten(), masks[name].flatten()
                blocks = [_solve(x[:, p], w[p], k[p], self.damping, self.steps) for p in slices(len(w), self.block)]
                found[name] = tuple(torch.cat(parts) for parts in zip(*blocks, strict=True))
        like = network.weights
        return Choice(
            {name: kept.view_as(like[name]) for name, (_, kept) in found.items()},
            {name: weight.view_as(like[name]).to(like[name].dtype) for name, (weight, _) in found.items()},
        )


def _solve(
    x: Tensor, weight: Tensor, kept: Tensor, damping: float, steps: int, support: Support | None = None
) -> tuple[Tensor, Tensor]:
    count = int(kept.sum())
    if count == len(kept) or count == 0:
        return weight.double() * kept, kept
    if steps:
        kept = _threshold(x, weight.double(), kept, damping, steps, support or (lambda score: _largest(score, count)))
    return joint_update(x, weight, kept, damping), kept


def _threshold(x: Tensor, weight: Tensor, kept: Tensor, damping: float, steps: int, support: Support) -> Tensor:
    """Iterative hard thresholding with a line search; the support it ends with, if that solves better than `kept`."""
    problem = _Regression(x, weight, damping)
    beta, found = weight * kept, kept
    value = problem.value(beta)
    for _ in range(steps):
        moved = _line_search(problem, beta, problem.gradient(beta), support, value)
        if moved is None:
            break
        beta, found, new_value = moved
        if value - new_value <= _LEAST_CHANGE * value:
            break
        value = new_value
    better = problem.value(joint_update(x, weight, found, damping)) < problem.value(
        joint_update(x, weight, kept, damping)
    )
    return found if better else kept


def _line_search(
    problem: _Regression, beta: Tensor, gradient: Tensor, support: Support, value: float
) -> tuple[Tensor, Tensor, float] | None:
    """The next point, support and value: the minimum along the gradient while the support stays, else a step beyond."""

    def at(step: float) -> tuple[Tensor, Tensor, float]:
        point = beta - step * gradient
        kept = support(point.abs())
        return point * kept, kept, problem.value(point * kept)

    inside = beta != 0
    if not inside.any() or inside.all():  # nothing to exchange
        return None
    along = gradient * inside
    best_step = float(along.square().sum()) / max(problem.curvature(along), 1e-300)
    strongest = gradient[~inside].abs().max()
    longest = float((beta[inside].abs() / (strongest + gradient[inside].abs())).min())  # that surely keeps the support
    if best_step <= longest:
        return at(best_step)
    found: tuple[Tensor, Tensor, float] | None = None
    step = longest * (1 + 1e-4)
    for _ in range(_DOUBLINGS):
        further = at(step)
        if further[2] >= (value if found is None else found[2]):
            break
        found = further
        step *= 2
    return found


def _largest(score: Tensor, count: int) -> Tensor:
    kept = torch.zeros_like(score, dtype=torch.bool)
    kept[score.argsort(descending=True, stable=True)[:count]] = True
    return kept


class _Regression:
    def __init__(self, x: Tensor, weight: Tensor, damping: float) -> None:
        self.x, self.weight, self.ridge = x, weight, len(x) * damping
        self.scale = x.dtype

    def residual(self, beta: Tensor) -> Tensor:
        return (self.x @ (beta - self.weight).to(self.scale)).double()

    def value(self, beta: Tensor) -> float:
        return float(self.residual(beta).square().sum() + self.ridge * (beta - self.weight).square().sum()) / 2

    def curvature(self, direction: Tensor) -> float:
        along = self.x @ direction.to(self.scale)
        return float(along.double().square().sum() + self.ridge * direction.square().sum())

    def gradient(self, beta: Tensor) -> Tensor:
        back = (self.x.T @ self.residual(beta).to(self.scale)).double()
        return back + self.ridge * (beta - self.weight)
