"""Exchanges: any layer method's mask, bettered by giving up a kept weight for a removed one while the error falls.

Greedy methods never take back what they removed, so their masks are far from the best. An exchange within an N:M group
(or, unstructured, within a row) keeps the pattern; what it gains is known exactly, all other kept weights making up for
it, from the *tableau* of the row: its Gram matrix G swept over the columns S that are kept. With P the inverse of G_SS,

    T_SS = -P        T_SN = P G_SN        T_NN = G_NN - G_NS P G_SN

and beside it the kept weights w_S and, for the removed ones, what their columns still explain, c_N = (G (w0 - w))_N.
Weight i costs w_i^2 / P_ii; j, once i has gone, brings (c_j + T_ij w_i / P_ii)^2 / (T_jj + T_ij^2 / P_ii). To sweep a
column in or out changes T by a rank-one part. These parts are kept as vectors and T is never written: columns are made
when they are asked for. After some exchanges all begins anew from the mask as it is then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..devices.working_memory import bytes_at_once
from ..errors import ArgumentError, InputError
from ..linalg.gram import damped, inverted
from ..linalg.rows import as_rows, from_rows, least_squares
from ..patterns.base import NM, Pattern
from . import NAMES, Choice, LayerMethod, Reads, as_method

_BEFORE_ANEW = 64  # exchanges of each row
_COPIES = 6  # of kept x all columns, while tableaus begin


@dataclass(frozen=True)
class Exchange:
    start: str | LayerMethod = "alps"  # whose masks are bettered
    damping: float = 0.01  # relative to the mean diagonal of the Gram matrix
    least_gain: float = 1e-4  # of the row's error: an exchange that gains less ends the row's search
    reads: Reads = "auto"

    def __post_init__(self) -> None:
        self._first()  # says at once what is wrong with it

    def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Pattern) -> Choice:
        mask = self._first().choose_layer(name, weight, gram, pattern).masks[name]
        rows, gram = as_rows(weight, gram)
        gram = damped(gram, self.damping)
        kept = mask.to(rows.device).movedim(1, -1).reshape(rows.flatten(0, 1).shape)
        which = torch.arange(len(rows), device=rows.device).repeat_interleave(rows.shape[1])
        group = pattern.m if isinstance(pattern, NM) else None
        kept = exchange(rows.flatten(0, 1), gram, which, kept, group, self.least_gain).view_as(rows)
        return Choice({name: from_rows(kept, weight)}, {name: from_rows(least_squares(rows, gram, kept), weight)})

    def _first(self) -> LayerMethod:
        method = as_method(self.start)
        if isinstance(method, LayerMethod):
            return method
        able = [name for name in NAMES if name != "exchange" and isinstance(as_method(name), LayerMethod)]
        raise ArgumentError(
            f"exchanges start from {self.start!r}, which chooses all layers' masks together; expected a layer-wise "
            f"method: {', '.join(map(repr, able))}"
        )


def exchange(
    rows: Tensor, gram: Tensor, which: Tensor, kept: Tensor, group: int | None, least_gain: float = 0.0
) -> Tensor:
    """A mask (rows x columns) with as many kept columns in each row, and in each `group` of columns, as the given one.

    Row i has the Gram matrix gram[which[i]]. In double precision: what a column still explains is a small difference of
    large numbers, and single precision ends the search of a layer of ResNet50 at a third of its exchanges.
    """
    kept = kept.clone()
    open_rows = (kept.any(1) & ~kept.all(1)).nonzero()[:, 0]
    most = int(kept.sum(1).max())  # exchanges of each row: rounding must not make it go round in circles
    for begun in range(0, most, _BEFORE_ANEW):
        if not len(open_rows):
            break
        widest = int(kept[open_rows].sum(1).max())
        at_once = max(1, bytes_at_once(rows.device) // (_COPIES * widest * rows.shape[1] * rows.element_size()))
        still = []
        for part in open_rows.split(at_once):
            tableaus = _Tableaus(rows[part], gram, which[part], kept[part], group or 1)
            going = torch.ones_like(part, dtype=torch.bool)
            for _ in range(min(_BEFORE_ANEW, most - begun)):
                going = tableaus.exchange_one(going, least_gain, in_groups=group is not None)
                if not going.any():
                    break
            kept[part] = tableaus.kept
            still.append(part[going])
        open_rows = torch.cat(still)
    return kept


class _Tableaus:
    """One for each row. Only blocks of `size` columns on the diagonal are held, and vectors that make the rest."""

    def __init__(self, rows: Tensor, gram: Tensor, which: Tensor, kept: Tensor, size: int) -> None:
        self._gram, self._which, self._size = gram, which, size
        self._everyone = torch.arange(len(rows), device=rows.device)
        self.kept, self._kept_at_start = kept.clone(), kept
        counts = kept.sum(1)
        width = int(counts.max())
        self._columns = (~kept).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]  # kept ones first
        self._real = torch.arange(width, device=rows.device) < counts[:, None]
        self._inverse = self._inverted()
        wanted = self._times_gram(rows)
        fitted = torch.bmm(self._inverse, wanted.gather(1, self._columns).unsqueeze(2)).squeeze(2)
        weight = self._in_place(fitted)
        self._values = torch.where(kept, weight, wanted - self._times_gram(weight))
        self._error = ((rows - weight) * (wanted - self._times_gram(weight))).sum(1).clamp(min=0)
        self._blocks = self._diagonal_blocks()
        # What T has changed by since: vectors with their signs, and a shift of its diagonal.
        self._vectors = rows.new_empty(len(rows), 2 * _BEFORE_ANEW, rows.shape[1])
        self._signs: list[float] = []
        self._shift = torch.zeros_like(rows)

    def exchange_one(self, going: Tensor, least_gain: float, in_groups: bool) -> Tensor:
        """The best exchange of each row that is going; which rows found one that is worth it."""
        if in_groups:
            out, into, gain = self._best_pair()
            going = going & (gain > least_gain * self._error)
            self._sweep(out, "out", going)
            self._sweep(into, "in", going)
        else:  # the best to take in, then the cheapest to give up: itself, where nothing is to be gained
            into = self._brings().masked_fill(self.kept, -torch.inf).argmax(1)
            brought = self._brings()[self._everyone, into]
            self._sweep(into, "in", going)
            out = self._brings().masked_fill(~self.kept, torch.inf).argmin(1)
            gain = brought - self._brings()[self._everyone, out]
            worth = going & (gain > least_gain * self._error)
            out = torch.where(worth, out, into)
            self._sweep(out, "out", going)
            going = worth
        self._error = self._error - gain * going
        return going

    def _best_pair(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of all groups: which kept column to give up for which removed one, and by how much the error falls."""
        count, size = len(self.kept), self._size
        kept, value = self.kept.view(count, -1, size), self._values.view(count, -1, size)
        diagonal = self._blocks.diagonal(dim1=2, dim2=3)
        cost = value.square() / -diagonal  # of i
        ratio = self._blocks / -diagonal.unsqueeze(3)  # T_ij / P_ii
        explains = value.unsqueeze(2) + ratio * value.unsqueeze(3)
        alone = diagonal.unsqueeze(2) + ratio * self._blocks
        gain = explains.square() / alone - cost.unsqueeze(3)
        gain = gain.masked_fill(~(kept.unsqueeze(3) & ~kept.unsqueeze(2)), -torch.inf).flatten(1)
        best, at = gain.max(1)
        first = at // size**2 * size  # of the group
        return first + at // size % size, first + at % size, best

    def _brings(self) -> Tensor:
        """What each removed column would bring, all others making way; for kept ones, what to lose them would cost."""
        return self._values.square() / self._blocks.flatten(1).abs()  # of size 1

    def _sweep(self, at: Tensor, way: Literal["in", "out"], where: Tensor) -> None:
        """T - u u' / D, with D = T_pp and u = T_p but for u_p = D - s; then 2 s off T_pp. (s = 1 in, -1 out.)"""
        sign = 1.0 if way == "in" else -1.0
        here = (self._everyone, at)
        vector = self._column(at)
        pivot = (sign * vector[here]).clamp(min=torch.finfo(vector.dtype).tiny)  # |D|: positive in, negative out
        vector[here] = sign * (pivot - 1)
        vector = vector * (where / pivot.sqrt())[:, None]
        scaled = self._values[here] / pivot.sqrt()
        self._values = self._values - sign * vector * scaled[:, None]
        within = vector.view(len(vector), -1, self._size)
        self._blocks = self._blocks - sign * within.unsqueeze(3) * within.unsqueeze(2)
        in_group = at % self._size
        self._blocks[self._everyone, at // self._size, in_group, in_group] -= 2 * sign * where
        self._shift[here] += 2 * sign * where
        self._vectors[:, len(self._signs)] = vector
        self._signs.append(sign)
        self.kept[here] = torch.where(where, sign > 0, self.kept[here])

    def _column(self, at: Tensor) -> Tensor:
        """T[:, p], as it was at the start and as all changes since have made it."""
        was_kept = self._kept_at_start[self._everyone, at][:, None]
        gram = self._gram[self._which, at].masked_fill(was_kept, 0)
        slot = (self._columns == at[:, None]) & self._real
        side = torch.where(was_kept, slot.to(gram.dtype), gram.gather(1, self._columns))
        solved = self._in_place(torch.bmm(self._inverse, side.unsqueeze(2)).squeeze(2))
        column = torch.where(self._kept_at_start, solved, gram - self._times_gram(solved))
        column = torch.where(was_kept, -column, column)
        known = self._vectors[:, : len(self._signs)]
        shares = known[self._everyone, :, at] * known.new_tensor(self._signs)
        column = column - torch.bmm(shares.unsqueeze(1), known).squeeze(1)
        column[self._everyone, at] -= self._shift[self._everyone, at]
        return column

    def _inverted(self) -> Tensor:
        block = self._gram[self._which[:, None, None], self._columns[:, :, None], self._columns[:, None, :]]
        both = self._real[:, :, None] & self._real[:, None, :]
        if not both.all():  # rows that keep fewer are padded with columns that couple to nothing
            block = block * both
            block.diagonal(dim1=1, dim2=2).add_(~self._real)
        found = inverted(block)
        if found is None:
            raise InputError("the second moments of the layer's inputs are singular; raise the damping of Exchange")
        return found * both

    def _diagonal_blocks(self) -> Tensor:
        count, columns, size = len(self.kept), self.kept.shape[1], self._size
        side = self._gram[self._which[:, None], self._columns] * self._real.unsqueeze(2)  # G_S: kept x all
        solved = torch.bmm(self._inverse, side)
        grouped = (count, -1, columns // size, size)
        first = torch.arange(0, columns, size, device=side.device)
        places = first[:, None] + torch.arange(size, device=side.device)
        own = self._gram[:, places[:, :, None], places[:, None, :]][self._which]
        blocks = own - torch.einsum("bkgi,bkgj->bgij", side.view(grouped), solved.view(grouped))
        # Rows of kept columns: -P beside kept ones, P G_S beside the others; and those the other way round.
        inverse = torch.zeros_like(solved).scatter_(
            2, self._columns[:, None].expand(-1, solved.shape[1], -1), self._inverse
        )
        solved = torch.where(self.kept[:, None], -inverse, solved)
        around = self._columns.unsqueeze(2) // size * size + torch.arange(size, device=side.device)
        kept_rows = solved.gather(2, around) * self._real.unsqueeze(2)
        kept = self.kept.view(count, -1, size)
        spread = torch.zeros(count, columns, size, dtype=side.dtype, device=side.device)
        spread.scatter_add_(1, self._columns.unsqueeze(2).expand(-1, -1, size), kept_rows)
        spread = spread.view_as(blocks)
        return torch.where(kept.unsqueeze(3), spread, torch.where(kept.unsqueeze(2), spread.mT, blocks))

    def _in_place(self, values: Tensor) -> Tensor:
        """Values of the kept columns where these stand in a row, zeros elsewhere."""
        return values.new_zeros(self.kept.shape).scatter_add_(1, self._columns, values * self._real)

    def _times_gram(self, rows: Tensor) -> Tensor:
        if len(self._gram) == 1:
            return rows @ self._gram[0]
        return torch.bmm(rows.unsqueeze(1), self._gram[self._which]).squeeze(1)
