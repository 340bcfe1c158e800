"""Exchanges: the mask of another layer method, improved by exchanging a kept weight for a removed one.

Greedy methods never take back what they removed, so their masks are far from the best. An exchange within an N:M group
(or, unstructured, within a row) keeps the pattern. What it gains when all other kept weights make up for it is known
exactly from the *tableau* of the row: its Gram matrix G swept over the kept columns S. With P the inverse of G_SS,

    T_SS = -P        T_SN = P G_SN        T_NN = G_NN - G_NS P G_SN

and beside it the kept weights w_S and, for the removed ones, what their columns still explain, c_N = (G (w0 - w))_N.
Removing weight i costs w_i^2 / P_ii; then taking in j gains (c_j + T_ij w_i / P_ii)^2 / (T_jj + T_ij^2 / P_ii).
Sweeping a column in or out changes T by a rank-one part. These parts are kept as vectors and T is never written: its
columns are computed when they are needed. After some exchanges everything starts again from the mask reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..devices.working_memory import bytes_at_once
from ..errors import ArgumentError, InputError
from ..linalg.gram import damped, inverted
from ..linalg.rows import as_rows, from_rows, in_rows, least_squares
from ..patterns import Pattern
from .base import Choice, LayerMethod, Reads, Takes, as_method, require_pattern
from .names import LAYER_METHODS

_EXCHANGES_BETWEEN_STARTS = 64  # of each row
_COPIES = 6  # of kept x all columns, while tableaus are set up


@dataclass(frozen=True)
class Exchange:
    """Improves another layer method's mask: a kept weight is exchanged for a removed one while the error falls.

    Ours; the sweep operator is Goodnight's (1979). Written "exchange", or "obc+exchange" to start from OBC's masks.

    Args:
        start: The method whose masks are improved, by name or as an object; it must be a layer method.
        damping: Added to the Gram matrix, relative to its mean diagonal.
        least_gain: An exchange that gains less than this share of the row's error ends the row's search.
        reads: Which inputs the Gram matrix is of, see `snows.LayerMethod`.

    Raises:
        ArgumentError: If `start` is no layer method.

    Example:
        >>> import torch, snows
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
        >>> method = snows.Exchange("wanda")
        >>> result = snows.prune(model, torch.randn(64, 8), "2:4", mask=method, layers="0", progress=False)
        >>> int(result.masks["0.weight"].sum())
        16
    """

    start: str | LayerMethod = "alps"
    damping: float = 0.01
    least_gain: float = 1e-4
    reads: Reads = "auto"
    takes: ClassVar[Takes] = "single weights"

    def __post_init__(self) -> None:
        self._first()  # raises if `start` is no layer method

    def choose_layer(self, name: str, weight: Tensor, gram: Tensor, pattern: Pattern) -> Choice:
        require_pattern(self, {name: pattern})
        mask = self._first().choose_layer(name, weight, gram, pattern).masks[name]
        rows, gram = as_rows(weight, gram)
        gram = damped(gram, self.damping)
        which = torch.arange(len(rows), device=rows.device).repeat_interleave(rows.shape[1])
        size = None if pattern.group is None else pattern.group.size
        kept = in_rows(mask, gram).flatten(0, 1)
        kept = exchange(rows.flatten(0, 1), gram, which, kept, size, self.least_gain).view_as(rows)
        return Choice({name: from_rows(kept, weight)}, {name: from_rows(least_squares(rows, gram, kept), weight)})

    def _first(self) -> LayerMethod:
        method = as_method(self.start)
        if isinstance(method, LayerMethod):
            return method
        able = ", ".join(repr(name) for name in LAYER_METHODS if name != "exchange")
        raise ArgumentError(
            f"exchanges start from {self.start!r}, which chooses the masks of all layers together; expected a "
            f"layer-wise method: {able}"
        )


def exchange(
    rows: Tensor, gram: Tensor, which: Tensor, kept: Tensor, size: int | None, least_gain: float = 0.0
) -> Tensor:
    """A better mask (rows x columns). Each row, and each group of `size` columns, keeps as many columns as before.

    Row i has the Gram matrix gram[which[i]]. Everything is in double precision: what a column still explains is a small
    difference of large numbers, and single precision ends the search of a layer of ResNet50 after a third of its
    exchanges.
    """
    kept = kept.clone()
    open_rows = (kept.any(1) & ~kept.all(1)).nonzero()[:, 0]
    most = int(kept.sum(1).max())  # exchanges of each row: a limit in case rounding makes it go round in circles
    for done in range(0, most, _EXCHANGES_BETWEEN_STARTS):
        if not len(open_rows):
            break
        widest = int(kept[open_rows].sum(1).max())
        at_once = max(1, bytes_at_once(rows.device) // (_COPIES * widest * rows.shape[1] * rows.element_size()))
        still_open = []
        for part in open_rows.split(at_once):
            tableaus = _Tableaus(rows[part], gram, which[part], kept[part], size or 1)
            improving = torch.ones_like(part, dtype=torch.bool)
            for _ in range(min(_EXCHANGES_BETWEEN_STARTS, most - done)):
                improving = tableaus.exchange_one(improving, least_gain, in_groups=size is not None)
                if not improving.any():
                    break
            kept[part] = tableaus.kept
            still_open.append(part[improving])
        open_rows = torch.cat(still_open)
    return kept


class _Tableaus:
    """The tableaus of some rows. Of each, only the blocks of `size` columns on the diagonal are held, and the vectors
    that the rest is computed from."""

    def __init__(self, rows: Tensor, gram: Tensor, which: Tensor, kept: Tensor, size: int) -> None:
        self._gram, self._which, self._size = gram, which, size
        self._everyone = torch.arange(len(rows), device=rows.device)
        self.kept, self._kept_at_start = kept.clone(), kept
        counts = kept.sum(1)
        width = int(counts.max())
        self._columns = (~kept).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]  # kept ones first
        self._real = torch.arange(width, device=rows.device) < counts[:, None]
        self._inverse = self._inverted()
        targets = self._times_gram(rows)
        fitted = torch.bmm(self._inverse, targets.gather(1, self._columns).unsqueeze(2)).squeeze(2)
        weight = self._in_all_columns(fitted)
        self._values = torch.where(kept, weight, targets - self._times_gram(weight))  # w_S and c_N
        self._error = ((rows - weight) * (targets - self._times_gram(weight))).sum(1).clamp(min=0)
        self._blocks = self._diagonal_blocks()
        # The change of T since the start: vectors with their signs, and a shift of its diagonal.
        self._vectors = rows.new_empty(len(rows), 2 * _EXCHANGES_BETWEEN_STARTS, rows.shape[1])
        self._signs: list[float] = []
        self._shift = torch.zeros_like(rows)

    def exchange_one(self, improving: Tensor, least_gain: float, in_groups: bool) -> Tensor:
        """Make the best exchange in each row that is still improving; returns which rows found one worth making."""
        if in_groups:
            out, into, gain = self._best_pair()
            worth = improving & (gain > least_gain * self._error)
            self._sweep(out, "out", worth)
            self._sweep(into, "in", worth)
        else:  # take in the best column, then remove the cheapest: the same one again if nothing is gained
            into = self._worth_of_each().masked_fill(self.kept, -torch.inf).argmax(1)
            gained = self._worth_of_each()[self._everyone, into]
            self._sweep(into, "in", improving)
            out = self._worth_of_each().masked_fill(~self.kept, torch.inf).argmin(1)
            gain = gained - self._worth_of_each()[self._everyone, out]
            worth = improving & (gain > least_gain * self._error)
            out = torch.where(worth, out, into)
            self._sweep(out, "out", improving)
        self._error = self._error - gain * worth
        return worth

    def _best_pair(self) -> tuple[Tensor, Tensor, Tensor]:
        """For each row the best exchange within a group: the kept column, the removed one, and how the error falls."""
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

    def _worth_of_each(self) -> Tensor:
        """How the error would fall with each removed column, and rise without each kept one. For groups of size 1."""
        return self._values.square() / self._blocks.flatten(1).abs()

    def _sweep(self, at: Tensor, way: Literal["in", "out"], where: Tensor) -> None:
        """Sweep column p = at[row] in or out, in the rows `where`.

        T becomes T - u u' / D with D = T_pp and u = T_p except u_p = D - s; then T_pp falls by 2 s. (s = 1 in, -1 out.)
        """
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
        """T[:, p]: its value at the start, and all changes since."""
        was_kept = self._kept_at_start[self._everyone, at][:, None]
        gram = self._gram[self._which, at].masked_fill(was_kept, 0)
        slot = (self._columns == at[:, None]) & self._real
        side = torch.where(was_kept, slot.to(gram.dtype), gram.gather(1, self._columns))
        solved = self._in_all_columns(torch.bmm(self._inverse, side.unsqueeze(2)).squeeze(2))
        column = torch.where(self._kept_at_start, solved, gram - self._times_gram(solved))
        column = torch.where(was_kept, -column, column)
        vectors = self._vectors[:, : len(self._signs)]
        shares = vectors[self._everyone, :, at] * vectors.new_tensor(self._signs)
        column = column - torch.bmm(shares.unsqueeze(1), vectors).squeeze(1)
        column[self._everyone, at] -= self._shift[self._everyone, at]
        return column

    def _inverted(self) -> Tensor:
        """P of each row, zero where padded."""
        block = self._gram[self._which[:, None, None], self._columns[:, :, None], self._columns[:, None, :]]
        both = self._real[:, :, None] & self._real[:, None, :]
        if not both.all():  # rows that keep fewer columns are padded with columns that are coupled to nothing
            block = block * both
            block.diagonal(dim1=1, dim2=2).add_(~self._real)
        inverse = inverted(block)
        if inverse is None:
            raise InputError("the second moments of the layer's inputs are singular; raise the damping of Exchange")
        return inverse * both

    def _diagonal_blocks(self) -> Tensor:
        """T on the diagonal: rows x groups x size x size."""
        count, columns, size = len(self.kept), self.kept.shape[1], self._size
        side = self._gram[self._which[:, None], self._columns] * self._real.unsqueeze(2)  # G_S: kept x all
        solved = torch.bmm(self._inverse, side)
        grouped = (count, -1, columns // size, size)
        first = torch.arange(0, columns, size, device=side.device)
        places = first[:, None] + torch.arange(size, device=side.device)
        own = self._gram[:, places[:, :, None], places[:, None, :]][self._which]
        blocks = own - torch.einsum("bkgi,bkgj->bgij", side.view(grouped), solved.view(grouped))
        # T_SS and T_SN of each group are in the rows of its kept columns; T_NS is the transpose of T_SN.
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

    def _in_all_columns(self, values: Tensor) -> Tensor:
        """Values of the kept columns at these columns of a row, zeros elsewhere."""
        return values.new_zeros(self.kept.shape).scatter_add_(1, self._columns, values * self._real)

    def _times_gram(self, rows: Tensor) -> Tensor:
        if len(self._gram) == 1:
            return rows @ self._gram[0]
        return torch.bmm(rows.unsqueeze(1), self._gram[self._which]).squeeze(1)
