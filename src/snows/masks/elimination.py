"""Greedy elimination, exactly as Optimal Brain Surgeon defines it, for many rows at once.

Each step removes one weight from every row: the one that costs least once all others have made up for it. With the
inverse P of the row's Hessian, weight p costs w_p^2 / (2 P_pp); the others move by -P[:, p] w_p / P_pp, and P loses the
rank-one part P[:, p] P[p, :] / P_pp.

Updating P at every step would be bound by memory traffic. Instead the rank-one parts of some steps are kept as vectors
V, so that a row of P is P0[p, :] - V[:, p] V. P itself is updated once every so many steps, in one matrix product, and
shrunk to the remaining columns when enough have gone. A step works on the same memory as the one before it, so that on
a GPU its many small operations are launched as one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..devices.cuda_graph import Replayed
from ..devices.distributed.ranks import sharers
from ..devices.working_memory import bytes_at_once
from ..patterns import Group

_STEPS_BETWEEN_UPDATES = 64
_SHRINK = 0.8  # if at most this share of the columns is left


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


def eliminate(rows: Tensor, inverse: Tensor, which: Tensor, steps: int, group: Group | None = None) -> Elimination:
    """Remove `steps` weights from each of the rows (r x d). Row i has the inverse Hessian inverse[which[i]].

    With a `group`, as many of its consecutive columns are kept as it says. Several ranks share the rows.
    """
    width = rows.shape[1]
    at_once = max(1, int(bytes_at_once(rows.device) / (2 * width**2 * rows.element_size())))

    def eliminated(own: slice) -> list[Tensor]:
        chunks = zip(rows[own].split(at_once), which[own].split(at_once), strict=True)
        parts = [_eliminate(chunk, inverse, its, steps, group) for chunk, its in chunks]
        return [torch.cat([p.order for p in parts]), torch.cat([p.losses for p in parts])]

    order, losses = sharers().rows(eliminated, len(rows))
    return Elimination(order.to(rows.device), losses.to(rows.device))


def _eliminate(rows: Tensor, inverse: Tensor, which: Tensor, steps: int, group: Group | None) -> Elimination:
    width = rows.shape[1]
    state = _State(rows.clone(), inverse[which], steps, group or Group(width, 0))
    remove_one = Replayed(state.remove_one, rows.device)
    for begin in range(0, steps, _STEPS_BETWEEN_UPDATES):
        length = min(_STEPS_BETWEEN_UPDATES, steps - begin)
        for _ in range(length):
            remove_one()
        if begin + length == steps:
            break
        state.update()
        left = width - begin - length
        if left <= _SHRINK * state.width:
            state.shrink(left)
            remove_one = Replayed(state.remove_one, rows.device)  # its tensors are new ones
    return state.removed


class _State:
    """Rows between two steps, changed in place. Removed columns stay until the next `shrink`, but are closed."""

    def __init__(self, weight: Tensor, inverse: Tensor, steps: int, group: Group) -> None:
        count, width = weight.shape
        self._group = group
        device = weight.device
        self.removed = Elimination(
            torch.zeros(count, steps, dtype=torch.long, device=device), weight.new_zeros(count, steps)
        )
        self._everyone = torch.arange(count, device=device)
        self._weight, self._inverse = weight, inverse  # the inverse as it was at the last update
        self._columns = torch.arange(width, device=device).repeat(count, 1)  # their numbers before any shrinking
        self._gone = torch.zeros_like(weight, dtype=torch.bool)
        self._gone_of_group = torch.zeros(count, math.ceil(width / group.size), dtype=torch.long, device=device)
        self._step = torch.zeros(1, dtype=torch.long, device=device)  # counted from the start
        self._begin()

    @property
    def width(self) -> int:
        """How many columns are left since the last `shrink`."""
        return self._weight.shape[1]

    def _begin(self) -> None:
        """Make what depends on the present columns."""
        self._groups = self._columns // self._group.size
        self._closed = self._gone | (self._gone_of_group.gather(1, self._groups) >= self._group.removed)
        self._diagonal = self._inverse.diagonal(dim1=1, dim2=2).clone()
        self._vectors = self._weight.new_zeros(len(self._weight), _STEPS_BETWEEN_UPDATES, self.width)

    def remove_one(self) -> None:
        """Remove one weight from each row."""
        tiny = torch.finfo(self._weight.dtype).tiny
        saliency = (self._weight.square() / self._diagonal.clamp(min=tiny)).masked_fill_(self._closed, math.inf)
        p = saliency.argmin(1, keepdim=True)
        row = self._inverse[self._everyone, p[:, 0]]
        shares = self._vectors.gather(2, p.unsqueeze(1).expand(-1, _STEPS_BETWEEN_UPDATES, -1))
        row = torch.baddbmm(row.unsqueeze(1), shares.mT, self._vectors, alpha=-1).squeeze(1)
        pivot = row.gather(1, p).clamp_(min=tiny)
        value = self._weight.gather(1, p)
        self._weight.addcmul_(row, value / pivot, value=-1)
        row = row / pivot.sqrt()
        self._diagonal.addcmul_(row, row, value=-1)
        self._vectors.index_copy_(1, self._step % _STEPS_BETWEEN_UPDATES, row.unsqueeze(1))
        self.removed.order.index_copy_(1, self._step, self._columns.gather(1, p))
        self.removed.losses.index_copy_(1, self._step, value.square() / pivot)
        self._gone.scatter_(1, p, True)
        mine = self._groups.gather(1, p)
        self._gone_of_group.scatter_add_(1, mine, torch.ones_like(mine))
        full = self._gone_of_group.gather(1, mine) >= self._group.removed
        self._closed |= self._gone | (full & (self._groups == mine))
        self._step += 1

    def update(self) -> None:
        """Bring the inverse up to date."""
        self._inverse.baddbmm_(self._vectors.mT, self._vectors, alpha=-1)
        self._diagonal.copy_(self._inverse.diagonal(dim1=1, dim2=2))
        self._vectors.zero_()

    def shrink(self, left: int) -> None:
        """Drop the removed columns; `left` remain in each row."""
        here = (~self._gone).nonzero()[:, 1].view(-1, left)
        # First rows, then columns: indexing both at once takes index tensors larger than what is gathered.
        self._inverse = self._inverse.gather(1, here[:, :, None].expand(-1, -1, self.width))
        self._inverse = self._inverse.gather(2, here[:, None, :].expand(-1, left, -1))
        self._weight, self._columns, self._gone = (v.gather(1, here) for v in (self._weight, self._columns, self._gone))
        self._begin()
