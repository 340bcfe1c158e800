"""CHITA: a quadratic model of the loss under a budget of weights, as sparse regression.

With the gradients as rows of X: min 1/2 |X w - X b|^2 + N damping / 2 |b - w|^2 over b with k entries. Iterative hard
thresholding searches the support, on which the minimum is a ridge regression in closed form. X'X is never formed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Choice, Network, Takes, best_masks, require_pattern
from .fisher import joint_update, slices

_DOUBLINGS = 20
_LEAST_CHANGE = 1e-7

Support = Callable[[Tensor], Tensor]  # from scores to the mask of the weights that are kept
Solved = tuple[Tensor, Tensor]  # flat weights and their mask


@dataclass(frozen=True)
class CHITA:
    """Solves a quadratic model of the loss under a budget of weights, as sparse regression. Unstructured patterns only.

    Benbaki et al. 2023, "Fast as CHITA: Neural Network Pruning with Combinatorial Optimization".

    Args:
        gradients: How many gradients the model is made of.
        batch: Samples whose mean is one gradient.
        damping: The ridge, per gradient.
        steps: Steps of iterative hard thresholding; 0 keeps the support of the largest weights.
        block: Weights of a layer that are solved together; None solves the whole network together.

    Example:
        >>> import torch, snows
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
        >>> method = snows.CHITA(gradients=32, steps=5)
        >>> result = snows.prune(model, torch.randn(64, 8), 0.5, mask=method, layers="0", progress=False)
        >>> int(result.masks["0.weight"].sum())
        16
    """

    gradients: int = 1000
    batch: int = 1
    damping: float = 1e-4
    steps: int = 0
    block: int | None = 500
    takes: ClassVar[Takes] = "unstructured"

    def choose(self, network: Network) -> Choice:
        require_pattern(self, network.patterns)
        magnitudes = {name: w.abs() for name, w in network.weights.items()}
        return self.solve_on(best_masks(magnitudes, network.patterns), network)

    def solve_on(self, masks: dict[str, Tensor], network: Network, between_layers: bool = True) -> Choice:
        """Search for better supports than `masks` with the same number of weights, then solve on them.

        If the whole network is solved together, weights may move `between_layers` as far as their patterns allow.
        """
        if self.block is None:
            solved = self._solve_together(masks, network, between_layers)
        else:
            solved = self._solve_in_blocks(masks, network, self.block)
        like = network.weights
        return Choice(
            {name: kept.view_as(like[name]) for name, (_, kept) in solved.items()},
            {name: weight.view_as(like[name]).to(like[name].dtype) for name, (weight, _) in solved.items()},
        )

    def _solve_together(self, masks: dict[str, Tensor], network: Network, between_layers: bool) -> dict[str, Solved]:
        gradients = dict(network.gradients(self.gradients, self.batch))
        sizes = [network.weights[name].numel() for name in gradients]
        weight = torch.cat([network.weights[name].flatten() for name in gradients])
        kept = torch.cat([masks[name].flatten() for name in gradients])

        def support(score: Tensor) -> Tensor:
            parts = dict(zip(gradients, score.split(sizes), strict=True))
            if between_layers:
                return torch.cat(list(best_masks(parts, network.patterns).values()))
            return torch.cat([_largest(part, int(masks[name].sum())) for name, part in parts.items()])

        x = torch.cat(list(gradients.values()), dim=1)
        new, kept = _solve(x, weight, kept, self.damping, self.steps, support)
        return dict(zip(gradients, zip(new.split(sizes), kept.split(sizes), strict=True), strict=True))

    def _solve_in_blocks(self, masks: dict[str, Tensor], network: Network, block: int) -> dict[str, Solved]:
        solved = {}
        for name, x in network.gradients(self.gradients, self.batch):
            w, k = network.weights[name].flatten(), masks[name].flatten()
            parts = [_solve(x[:, p], w[p], k[p], self.damping, self.steps) for p in slices(len(w), block)]
            weights, kept = zip(*parts, strict=True)
            solved[name] = torch.cat(weights), torch.cat(kept)
        return solved


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
    """The support at the end of iterative hard thresholding with a line search, or `kept` if that solves better."""
    problem = _Regression(x, weight, damping)
    beta, reached = weight * kept, kept
    value = problem.value(beta)
    for _ in range(steps):
        moved = _line_search(problem, beta, problem.gradient(beta), support, value)
        if moved is None:
            break
        beta, reached, new_value = moved
        if value - new_value <= _LEAST_CHANGE * value:
            break
        value = new_value
    after, before = (problem.value(joint_update(x, weight, mask, damping)) for mask in (reached, kept))
    return reached if after < before else kept


def _line_search(
    problem: _Regression, beta: Tensor, gradient: Tensor, support: Support, value: float
) -> tuple[Tensor, Tensor, float] | None:
    """The next point, support and value; None if there is nothing to gain.

    If the minimum along the gradient has the present support, that is it; else steps that change the support are tried.
    """

    def at(step: float) -> tuple[Tensor, Tensor, float]:
        point = beta - step * gradient
        kept = support(point.abs())
        return point * kept, kept, problem.value(point * kept)

    inside = beta != 0
    if not inside.any() or inside.all():  # no other support
        return None
    along = gradient * inside
    best_step = float(along.square().sum()) / max(problem.curvature(along), 1e-300)
    strongest = gradient[~inside].abs().max()
    longest = float((beta[inside].abs() / (strongest + gradient[inside].abs())).min())  # that keeps the support
    if best_step <= longest:
        return at(best_step)
    best: tuple[Tensor, Tensor, float] | None = None
    step = longest * (1 + 1e-4)
    for _ in range(_DOUBLINGS):
        further = at(step)
        if further[2] >= (value if best is None else best[2]):
            break
        best = further
        step *= 2
    return best


def _largest(score: Tensor, count: int) -> Tensor:
    kept = torch.zeros_like(score, dtype=torch.bool)
    kept[score.argsort(descending=True, stable=True)[:count]] = True
    return kept


class _Regression:
    """The objective of the regression: its value, gradient and curvature. Products with X are in its precision."""

    def __init__(self, x: Tensor, weight: Tensor, damping: float) -> None:
        self.x, self.weight, self.ridge = x, weight, len(x) * damping
        self.dtype = x.dtype

    def residual(self, beta: Tensor) -> Tensor:
        return (self.x @ (beta - self.weight).to(self.dtype)).double()

    def value(self, beta: Tensor) -> float:
        return float(self.residual(beta).square().sum() + self.ridge * (beta - self.weight).square().sum()) / 2

    def curvature(self, direction: Tensor) -> float:
        along = self.x @ direction.to(self.dtype)
        return float(along.double().square().sum() + self.ridge * direction.square().sum())

    def gradient(self, beta: Tensor) -> Tensor:
        back = (self.x.T @ self.residual(beta).to(self.dtype)).double()
        return back + self.ridge * (beta - self.weight)
