"""For tests of mask methods: random layers and networks, and definitions in loops and explicit inverses, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from snows.patterns import NM, Pattern, Unstructured

# shape and groups; those with one input channel per group cannot take N:M
LAYERS = {
    "linear": ((5, 8), 1),
    "convolution": ((3, 4, 2, 2), 1),
    "grouped": ((4, 4, 1, 3), 2),
    "depthwise": ((4, 1, 3, 2), 4),
    "one dimension": ((2, 8, 2), 1),
}
PATTERNS: list[Pattern] = [Unstructured(0.35), Unstructured(0.7), NM(1, 4), NM(1, 2)]
CASES = [
    (name, pattern)
    for name, (shape, _) in LAYERS.items()
    for pattern in PATTERNS
    if pattern.refusal(torch.Size(shape)) is None
]
each_layer = pytest.mark.parametrize(("name", "pattern"), CASES, ids=[f"{name}, {pattern}" for name, pattern in CASES])

TWO_LAYERS = {"a": (3, 4), "b": (2, 2, 2, 1)}  # the weights of a network


class FakeNetwork:
    """A network whose gradients are random numbers, and whose loss is their quadratic model."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        pattern: Pattern | Mapping[str, Pattern],
        samples: int = 10,
        seed: int = 0,
        uses: Mapping[str, int] | None = None,
        dtype: torch.dtype = torch.float64,
        common: int = 4,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.seed = seed
        self.weights: Mapping[str, Tensor] = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            for name, shape in shapes.items()
        }
        given = pattern if isinstance(pattern, Mapping) else dict.fromkeys(shapes, pattern)
        self.patterns: Mapping[str, Pattern] = given
        self.uses: Mapping[str, int] = uses or dict.fromkeys(shapes, 1)
        sizes = [w.numel() for w in self.weights.values()]
        # some directions in common, so that weights make up for each other
        mix = torch.randn(common, sum(sizes), generator=generator, dtype=torch.float64)
        rows = torch.randn(samples, common, generator=generator, dtype=torch.float64) @ mix
        rows = rows + torch.randn(rows.shape, generator=generator, dtype=torch.float64)
        self.rows = {name: part.to(dtype).clone() for name, part in zip(shapes, rows.split(sizes, 1), strict=True)}

    def gradients(self, count: int, batch: int = 1) -> Iterator[tuple[str, Tensor]]:
        for name, rows in self.rows.items():
            n = max(1, min(count, len(rows) // batch))
            yield name, rows[: n * batch].unflatten(0, (n, batch)).mean(1)

    def loss(self, weights: Mapping[str, Tensor]) -> float:
        return sum(
            float((self.rows[name].double() @ (weight - self.weights[name]).flatten().double()).square().mean())
            for name, weight in weights.items()
        )


def layer(name: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A random weight and the second moments of correlated inputs."""
    shape, groups = LAYERS[name]
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    columns = math.prod(shape[1:])
    mix = torch.eye(columns, dtype=torch.float64) + 0.6 * torch.randn(
        groups, columns, columns, generator=generator, dtype=torch.float64
    )
    x = torch.randn(groups, 4 * columns, columns, generator=generator, dtype=torch.float64) @ mix
    return weight, x.mT @ x / x.shape[1]


def damped_per_row(weight: Tensor, gram: Tensor, damping: float) -> list[np.ndarray]:
    """The Hessian of each output row: that of its group, plus the damping times its mean diagonal."""
    per_group = weight.shape[0] // len(gram)
    made = []
    for row in range(weight.shape[0]):
        own = gram[row // per_group].numpy()
        made.append(own + damping * np.trace(own) / len(own) * np.eye(len(own)))
    return made


def groups_of(shape: tuple[int, ...], pattern: Pattern) -> list[int]:
    """For each column of the flattened weight the N:M group it is in: M input channels at one kernel position."""
    kernel = math.prod(shape[2:])
    if not isinstance(pattern, NM):
        return [0] * (shape[1] * kernel)
    return [(channel // pattern.m) * kernel + place for channel in range(shape[1]) for place in range(kernel)]


def greedy(
    row: np.ndarray, hessian: np.ndarray, steps: int, group: list[int], most: float = math.inf
) -> tuple[list[int], list[float]]:
    """Optimal Brain Surgeon, one weight at a time, with the whole inverse updated; what went, and what it cost."""
    w, inverse = row.copy(), np.linalg.inv(hessian)
    order: list[int] = []
    losses: list[float] = []
    for _ in range(steps):
        full = {g for g in group if sum(group[p] == g for p in order) >= most}
        free = [p for p in range(len(w)) if p not in order and group[p] not in full]
        p = min(free, key=lambda p: w[p] ** 2 / inverse[p, p])
        order.append(p)
        losses.append(w[p] ** 2 / inverse[p, p])
        w = w - inverse[:, p] * w[p] / inverse[p, p]
        inverse = inverse - np.outer(inverse[:, p], inverse[p]) / inverse[p, p]
        w[order] = 0
    return order, losses


def best_fit(row: np.ndarray, hessian: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """min |A (b - w)|^2 over b on the kept columns, with A'A the Hessian."""
    a = np.linalg.cholesky(hessian).T
    result = np.zeros_like(row)
    if kept.any():
        result[kept] = np.linalg.lstsq(a[:, kept], a @ row, rcond=None)[0]
    return result


def fit_all(weight: Tensor, hessians: list[np.ndarray], mask: Tensor) -> Tensor:
    rows = weight.flatten(1).numpy()
    fitted = [best_fit(rows[r], hessians[r], kept) for r, kept in enumerate(mask.flatten(1).numpy())]
    return torch.tensor(np.stack(fitted)).view_as(weight)


def squared_error(weight: Tensor, other: Tensor, hessians: list[np.ndarray]) -> float:
    changes = (weight - other).flatten(1).numpy()
    return sum(float(d @ h @ d) for d, h in zip(changes, hessians, strict=True))


def fisher_of(gradients: Tensor, damping: float) -> Tensor:
    total = damping * torch.eye(gradients.shape[1], dtype=torch.float64)
    for g in gradients.double():
        total = total + torch.outer(g, g) / len(gradients)
    return total
