"""Layouts as arrays, for models of thousands of tensors on thousands of ranks.

Shape legend: N entries (distinct boxes), D dimensions (tensors of fewer have 0:1 behind theirs), P ranks. A list of
lists is one array of values and `start`, where list k is values[start[k]:start[k + 1]].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from prophet.errors import LayoutError
from prophet.spec import IntArray
from prophet.state.space import Box, Space


def starts(lengths: IntArray) -> IntArray:
    """Where lists of these lengths begin, laid end to end, and where the last ends: [n + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def within(lengths: IntArray) -> IntArray:
    """0, 1, .. length - 1 for every length in turn."""
    total = int(lengths.sum())
    return np.arange(total, dtype=np.int64) - np.repeat(starts(lengths)[:-1], lengths)


def positions_of(first: IntArray, lengths: IntArray) -> IntArray:
    """The numbers first, first + 1, .. up to `length` of them, for every pair in turn."""
    return np.repeat(first, lengths) + within(lengths)


def positions(start: IntArray, lists: IntArray) -> IntArray:
    """Positions of the values of these lists, list after list."""
    return positions_of(start[lists], start[lists + 1] - start[lists])


def numbered(*columns: IntArray) -> tuple[IntArray, IntArray]:
    """Number the rows of some columns, as `np.unique` does for one.

    Returns:
        A number for every row, equal where all columns are, and the first row of every number.
    """
    n = len(columns[0])
    if n == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    # Sorting by one column is faster than by many
    keys = _packed(columns)
    order = np.argsort(keys[0], kind="stable") if len(keys) == 1 else np.lexsort(keys[::-1])
    new = np.zeros(n, dtype=bool)
    new[0] = True
    for key in keys:
        arranged = key[order]
        new[1:] |= arranged[1:] != arranged[:-1]
    number = np.empty(n, np.int64)
    number[order] = np.cumsum(new) - 1
    return number, order[new]


def _packed(columns: Sequence[IntArray]) -> list[IntArray]:
    """Fewer columns of the same order: as many in one as 62 bits hold."""
    keys: list[IntArray] = []
    room = 0
    for column in columns:
        low, high = int(column.min()), int(column.max())
        # The order of packed numbers is that of the columns, as long as nothing overflows an int64
        if keys and room * (high - low + 1) < 1 << 62:
            keys[-1] = keys[-1] * (high - low + 1) + (column - low)
            room *= high - low + 1
        else:
            keys.append(column - low)
            room = high - low + 1
    return keys


def distinct(values: IntArray) -> IntArray:
    """The different values, ascending."""
    arranged = np.sort(values)
    new = np.ones(len(arranged), dtype=bool)
    new[1:] = arranged[1:] != arranged[:-1]
    return arranged[new]


def numbered_lists(values: IntArray, start: IntArray) -> tuple[IntArray, IntArray]:
    """Number lists by what they hold.

    Returns:
        A number for every list, equal where lists are, and the first list of every number.
    """
    lengths = np.diff(start)
    # A list's digest is the sum of its scrambled values. So differences of one running sum give the digests of all
    # lists, and uint64 may overflow without harm. The place goes in too: lists in another order differ.
    mixed = _mix(values.astype(np.uint64) * np.uint64(2654435761) + within(lengths).astype(np.uint64))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    digest = (sums[start[1:]] - sums[start[:-1]]).view(np.int64)
    number, first = numbered(lengths, digest)
    # two lists of one digest would be taken for each other: compare every list with the first of its number
    same = values[positions(start, first[number])] == values[positions(start, np.arange(len(lengths)))]
    if not same.all():
        raise LayoutError("two lists of ranks have one digest; change a constant in prophet.state.table")
    return number, first


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scrambled bits (the finalizer of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def volumes(low: IntArray, high: IntArray) -> IntArray:
    """Elements of boxes low:high, [N, D] each: [N]."""
    found: IntArray = np.prod(high - low, axis=1, dtype=np.int64)
    return found


@dataclass(frozen=True, eq=False)
class Table:
    """A layout as arrays, in which no two entries are of one box: `table_of` merges them.

    Attributes:
        space: The tensors.
        ranks: Number of ranks, P.
        tensor: Tensor of every entry, in the space's order, [N].
        low: Where every box begins, [N, D].
        high: Where it ends, [N, D].
        start: Where every entry's ranks begin in `holder`, [N + 1].
        holder: Ranks that hold each entry, ascending.
    """

    space: Space
    ranks: int
    tensor: IntArray
    low: IntArray
    high: IntArray
    start: IntArray
    holder: IntArray

    @property
    def volume(self) -> IntArray:
        """Elements of every entry, [N]."""
        return volumes(self.low, self.high)

    def box(self, entry: int) -> Box:
        """The entry's box, in as many dimensions as its tensor has."""
        return box_of(self.space, int(self.tensor[entry]), self.low[entry], self.high[entry])

    @cached_property
    def _by_rank(self) -> tuple[IntArray, IntArray]:
        order = np.argsort(self.holder, kind="stable")
        entry = np.repeat(np.arange(len(self.tensor)), np.diff(self.start))[order]
        return starts(np.bincount(self.holder, minlength=self.ranks)), entry

    def on(self, rank: int) -> IntArray:
        """The entries that `rank` holds."""
        start, entry = self._by_rank
        return entry[start[rank] : start[rank + 1]]

    def meeting(self, rank: int, tensor: IntArray, low: IntArray, high: IntArray) -> tuple[IntArray, IntArray]:
        """Find which of some boxes have an element in common with an entry of a rank.

        Args:
            rank: The rank.
            tensor: Tensor of every box, [M].
            low: Where every box begins, [M, D].
            high: Where it ends, [M, D].

        Returns:
            Pairs of a box and an entry, ascending by box. Entries are counted as in `on`.
        """
        entry = self.on(rank)
        order = np.argsort(self.tensor[entry], kind="stable")
        # Only entries of the same tensor can meet a box: they stand side by side after sorting
        arranged = self.tensor[entry[order]]
        first = np.searchsorted(arranged, tensor, side="left")
        many = np.searchsorted(arranged, tensor, side="right") - first
        box, at = np.repeat(np.arange(len(tensor)), many), order[positions_of(first, many)]
        there = entry[at]
        meet = ((self.low[there] < high[box]) & (low[box] < self.high[there])).all(1)
        return box[meet], at[meet]

    def rank_bytes(self) -> IntArray:
        """Bytes that every rank holds, [P]."""
        each = np.repeat(self.volume * self.space.item_bytes[self.tensor], np.diff(self.start))
        return np.bincount(self.holder, each, self.ranks).astype(np.int64)


def box_of(space: Space, tensor: int, low: IntArray, high: IntArray) -> Box:
    """Make a `Box` of a row of arrays, without the dimensions that the tensor does not have.

    Args:
        space: The tensors.
        tensor: Number of the tensor.
        low: Where the box begins, [D].
        high: Where it ends, [D].
    """
    dims = len(space.tensors[tensor].shape)
    return _box(tuple(low[:dims].tolist()), tuple(high[:dims].tolist()))


@lru_cache(maxsize=1 << 14)
def _box(start: tuple[int, ...], stop: tuple[int, ...]) -> Box:
    # Tensors of a model have few shapes, and each move asks again: to check a box takes longer than to look it up
    return Box(start, stop)


def table_of(
    space: Space, ranks: int, tensor: IntArray, low: IntArray, high: IntArray, start: IntArray, holder: IntArray
) -> Table:
    """Build a table from entries in any order, of which several may be of one box.

    Args:
        space: The tensors.
        ranks: Number of ranks.
        tensor: Tensor of every entry, [M].
        low: Where every box begins, [M, D].
        high: Where it ends, [M, D].
        start: Where every entry's ranks begin in `holder`, [M + 1].
        holder: Ranks that hold each entry; a rank may stand there twice.

    Raises:
        LayoutError: A box lies outside its tensor, or a rank outside 0 .. `ranks` - 1.
    """
    if len(holder) and not (holder.min() >= 0 and holder.max() < ranks):
        raise LayoutError(f"ranks {holder.min()}..{holder.max()} are to hold boxes, outside 0..{ranks - 1}")
    outside = ((low < 0) | (high < low) | (high > space.shapes[tensor])).any(1)
    if outside.any():
        k = int(outside.argmax())
        box = box_of(space, int(tensor[k]), np.maximum(low[k], 0), np.maximum(high[k], low[k]))
        raise LayoutError(f"{space.tensors[int(tensor[k])].name}{box} lies outside its tensor")
    number, first = numbered(tensor, *low.T, *high.T)
    # A rank is named once per box, whoever named it how often
    key = distinct(np.repeat(number, np.diff(start)) * ranks + holder)
    entry, ranked = np.divmod(key, ranks)
    lengths = np.bincount(entry, minlength=len(first))
    # What nobody holds is no entry
    full = lengths > 0
    return Table(space, ranks, tensor[first][full], low[first][full], high[first][full], starts(lengths[full]), ranked)


def table_from(space: Space, pieces: Sequence[Sequence[tuple[str, Box]]]) -> Table:
    """The table of a layout that is given as pieces by rank."""
    dims = space.shapes.shape[1]
    rows = [
        (
            space.number[name],
            *box.start,
            *(0,) * (dims - len(box.start)),
            *box.stop,
            *(1,) * (dims - len(box.stop)),
            rank,
        )
        for rank, row in enumerate(pieces)
        for name, box in row
    ]
    found = np.array(rows, dtype=np.int64).reshape(len(rows), 2 * dims + 2)
    tensor, low, high = found[:, 0], found[:, 1 : 1 + dims], found[:, 1 + dims : 1 + 2 * dims]
    return table_of(space, len(pieces), tensor, low, high, np.arange(len(rows) + 1), found[:, -1])


def flat_ranges(shape: IntArray, begin: IntArray, end: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The boxes of ranges of elements of row-major arrays: `flat_boxes` for many at once.

    Args:
        shape: Lengths of every array, [M, D].
        begin: First element of every range, [M].
        end: The element behind its last one, [M].

    Returns:
        Which range each box is of, and where boxes begin and end, [*, D] each.
    """
    many, dims = shape.shape
    index = np.flatnonzero(begin < end)
    if dims == 1:
        return index, begin[index, None], end[index, None]
    if many == 0:
        return index, np.zeros((0, dims), np.int64), np.zeros((0, dims), np.int64)
    shape, begin, end = shape[index], begin[index], end[index]
    # As in `flat_boxes`: a part of the first row, whole rows, a part of the last row. The parts are ranges of arrays
    # with a dimension less. Rows of no elements must not divide by zero.
    row = np.maximum(np.prod(shape[:, 1:], axis=1, dtype=np.int64), 1)
    first, last = begin // row, (end - 1) // row
    # A range within one row is neither a head nor a tail, unless it is all of the row
    one = (first == last) & ((begin % row > 0) | (end % row > 0))
    head, tail = ~one & (begin % row > 0), ~one & (end % row > 0)
    full, full_end = first + head, np.where(tail, last, last + 1)
    middle = np.flatnonzero(~one & (full < full_end))
    parts = [np.flatnonzero(p) for p in (one, head, tail)]
    which = np.concatenate(parts)
    at = np.concatenate([first[parts[0]], first[parts[1]], last[parts[2]]])
    inner_begin = np.concatenate([(begin - first * row)[parts[0]], (begin - first * row)[parts[1]], 0 * parts[2]])
    inner_end = np.concatenate([(end - first * row)[parts[0]], row[parts[1]], (end - last * row)[parts[2]]])
    k, low, high = flat_ranges(shape[which, 1:], inner_begin, inner_end)
    low = np.concatenate([np.column_stack([at[k], low]), np.column_stack([full[middle], 0 * shape[middle, 1:]])])
    high = np.concatenate([np.column_stack([at[k] + 1, high]), np.column_stack([full_end[middle], shape[middle, 1:]])])
    return index[np.concatenate([which[k], middle])], low, high
