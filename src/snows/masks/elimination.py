"""Greedy elimination, exactly as Optimal Brain Surgeon defines it, for many rows at once.

From each row, again and again, the weight goes whose loss costs least once all others have made up for it. With the
inverse P of the row's Hessian: weight p costs w_p^2 / (2 P_pp); the others move by -P[:, p] w_p / P_pp, and P loses the
rank-one part P[:, p] P[p, :] / P_pp.

Writing P anew at every step would be bound by memory traffic. Instead the rank-one parts of some steps are kept as
vectors V, so that a row of P is P0[p, :] - V[:, p] V, and only every so often P itself is brought up to date, in one
matrix product, and shrunk to the columns that are left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import bytes_at_once

_STEPS_BETWEEN_UPDATES = 64  # at least
_UPDATES = {"cpu": 4, "cuda": 16}  # at most: fast memory likes many, as each makes the steps after it cheaper


@dataclass(frozen=True)
class Elimination:
    """What was removed from each row, in order."""

    order: Tensor  # rows x steps: columns
    losses: Tensor  # rows x steps: the rise of the squared error at each step

    def kept(self, columns: int, counts: Tensor) -> Tensor:
        """The mask (rows x columns) after the first `counts` removals of each row."""
        steps = torch.arange(self.order.shape[1], device=self.order.device)
        gone = steps < counts[:, None]
        kept = torch.ones(len(self.order), columns, dtype=torch.bool, device=self.order.device)
        return kept.scatter_(1, self.order, ~gone)


def eliminate(
    rows: Tensor, inverse: Tensor, which: Tensor, steps: int, group: tuple[int, int] | None = None
) -> Elimination:
    """Remove `steps` weights from each of the rows (r x d). Row i has the inverse Hessian inverse[which[i]].

    With `group` = (M, most): of every M consecutive columns at most `most` are removed.
    """
    width = rows.shape[1]
    at_once = max(1, int(bytes_at_once(rows.device) / (2 * width**2 * rows.element_size())))
    parts = [
        _eliminate(rows[i : i + at_once], inverse, which[i : i + at_once], steps, group)
        for i in range(0, len(rows), at_once)
    ]
    return Elimination(torch.cat([p.order for p in parts]), torch.cat([p.losses for p in parts]))


def _eliminate(rows: Tensor, inverse: Tensor, which: Tensor, steps: int, group: tuple[int, int] | None) -> Elimination:
    count, width = rows.shape
    everyone = torch.arange(count, device=rows.device)
    weight = rows.clone()
    columns = torch.arange(width, device=rows.device).expand(count, -1)  # those that are left, for each row
    shared = True  # until the first update every row still has the inverse of its group
    diagonal = inverse.diagonal(dim1=1, dim2=2)[which].clone()
    m, most = group or (width, width)
    removed = torch.zeros(count, math.ceil(width / m), dtype=torch.long, device=rows.device)
    order = torch.empty(count, steps, dtype=torch.long, device=rows.device)
    losses = torch.empty(count, steps, dtype=rows.dtype, device=rows.device)
    tiny = torch.finfo(rows.dtype).tiny
    pause = max(_STEPS_BETWEEN_UPDATES, width // _UPDATES.get(rows.device.type, 4))
    for begin in range(0, steps, pause):
        length = min(pause, steps - begin)
        vectors = rows.new_empty(count, length, weight.shape[1])
        closed = torch.zeros_like(weight, dtype=torch.bool)
        if group is not None:
            closed |= removed.gather(1, columns // m) >= most
        for step in range(length):
            saliency = (weight.square() / diagonal.clamp(min=tiny)).masked_fill(closed, math.inf)
            p = saliency.argmin(1)
            row = inverse[which, p] if shared else inverse[everyone, p]
            known = vectors[:, :step]
            row = row - torch.bmm(known[everyone, :, p].unsqueeze(1), known).squeeze(1)
            pivot = row[everyone, p].clamp(min=tiny)
            losses[:, begin + step] = weight[everyone, p].square() / pivot
            order[:, begin + step] = columns[everyone, p]
            weight = weight - row * (weight[everyone, p] / pivot)[:, None]
            vectors[:, step] = row / pivot.sqrt()[:, None]
            diagonal = diagonal - vectors[:, step].square()
            closed[everyone, p] = True
            if group is not None:
                mine = columns[everyone, p] // m
                removed[everyone, mine] += 1
                full = removed[everyone, mine] >= most
                closed |= full[:, None] & (columns // m == mine[:, None])
        if begin + length == steps:
            break
        gone = torch.zeros_like(closed).scatter_(1, _places(columns, order[:, begin : begin + length], width), True)
        left = (~gone).nonzero()[:, 1].view(count, -1)
        smaller = (
            inverse[which[:, None, None], left[:, :, None], left[:, None, :]]
            if shared
            else (inverse[everyone[:, None, None], left[:, :, None], left[:, None, :]])
        )
        vectors = vectors.gather(2, left[:, None, :].expand(-1, length, -1))
        inverse, shared = torch.baddbmm(smaller, vectors.transpose(1, 2), vectors, alpha=-1), False
        weight, columns = weight.gather(1, left), columns.gather(1, left)
        diagonal = inverse.diagonal(dim1=1, dim2=2).clone()
    return Elimination(order, losses)


def _places(columns: Tensor, wanted: Tensor, width: int) -> Tensor:
    """Where each wanted column stands among those that are left."""
    place = torch.zeros(len(columns), width, dtype=torch.long, device=columns.device)
    place.scatter_(1, columns, torch.arange(columns.shape[1], device=columns.device).expand_as(columns))
    return place.gather(1, wanted)
