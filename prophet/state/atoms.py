"""Where two layouts meet: the boxes of which every rank holds all or nothing, before and after.

Shape legend: C classes of tensors, A atoms, D dimensions, P ranks. Tensors that lie alike in both layouts are one class
and are cut once: a parameter and its moments, or the layers of one stage. An atom is the common part of a box from
before and one from after, so it has the ranks that hold it and those that want it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prophet.errors import LayoutError
from prophet.spec import BoolArray, IntArray
from prophet.state.space import Box
from prophet.state.table import Table, numbered, numbered_lists, positions, starts, volumes, within


@dataclass(frozen=True, eq=False)
class Lists:
    """Lists of ranks, no two of them equal, laid end to end.

    Attributes:
        start: Where each list begins in `values`, and where the last one ends.
        values: Ranks; list k is values[start[k]:start[k + 1]], ascending.
    """

    start: IntArray
    values: IntArray

    def of(self, k: int) -> IntArray:
        """The ranks of list k."""
        return self.values[self.start[k] : self.start[k + 1]]


@dataclass(frozen=True, eq=False)
class Atoms:
    """What `after` wants, cut so that a rank holds all of a box or nothing.

    Attributes:
        first: Where each class begins in `members`, and where the last one ends, [C + 1].
        members: Tensors, class by class.
        klass: Class of every atom, [A].
        low: Where every atom begins, [A, D].
        high: Where it ends, [A, D].
        holders: Which list of `lists` holds the atom under the old layout, [A].
        takers: Which list of `lists` wants it under the new one, [A].
        lists: The lists of ranks.
        apart: Whether no two boxes of `after` share a part, so that no element is in two atoms.
    """

    first: IntArray
    members: IntArray
    klass: IntArray
    low: IntArray
    high: IntArray
    holders: IntArray
    takers: IntArray
    lists: Lists
    apart: bool

    @property
    def volume(self) -> IntArray:
        """Elements of every atom, [A]."""
        return volumes(self.low, self.high)

    def class_bytes(self, item_bytes: IntArray) -> IntArray:
        """Bytes that one element takes in all tensors of a class together, [C]."""
        found: IntArray = np.add.reduceat(item_bytes[self.members], self.first[:-1])
        return found

    def demand(self, item_bytes: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Sum up bytes by who holds and who wants them.

        Returns:
            For every pair of lists that occurs: the list of holders, the list of takers, and the bytes.
        """
        pair, first = numbered(self.holders, self.takers)
        n_bytes = np.zeros(len(first), np.int64)
        np.add.at(n_bytes, pair, self.volume * self.class_bytes(item_bytes)[self.klass])
        return self.holders[first], self.takers[first], n_bytes


def cut(before: Table, after: Table) -> Atoms:
    """Cut what `after` wants along the boxes of `before`.

    Raises:
        LayoutError: `after` wants what no rank holds.
    """
    lists, held, wanted = _lists(before, after)
    klass, first, members = _classes(before, after, held, wanted)
    # Tensors of a class are cut alike, so one stands for all: a thousand equal layers cost as much as one
    stands_for = np.zeros(len(before.space.tensors), dtype=bool)
    stands_for[members[first[:-1]]] = True
    a = np.flatnonzero(stands_for[before.tensor] & (before.volume > 0))
    b = np.flatnonzero(stands_for[after.tensor] & (after.volume > 0))
    class_a, class_b = klass[before.tensor[a]], klass[after.tensor[b]]
    boxes_a, boxes_b = (before.low[a], before.high[a]), (after.low[b], after.high[b])
    i, j = _meet(class_a, *boxes_a, class_a, *boxes_a)
    rough = np.zeros(len(first) - 1, dtype=bool)
    # boxes from before overlap without being equal
    rough[class_a[i[i != j]]] = True
    i, j = _meet(class_b, *boxes_b, class_b, *boxes_b)
    apart = not (i != j).any()
    i, j = _meet(class_a, *boxes_a, class_b, *boxes_b)
    # An intersection of two boxes is an atom only where boxes from before are equal or apart. Of two that overlap in
    # part, it would put an element into two atoms.
    smooth = ~rough[class_b[j]]
    i, j = i[smooth], j[smooth]
    low, high = np.maximum(before.low[a[i]], after.low[b[j]]), np.minimum(before.high[a[i]], after.high[b[j]])
    holders = held[a[i]]
    if rough.any():
        extra = _cut_rough(before, after, a[rough[class_a]], b, rough[class_b], held, lists)
        lists, (more_j, more_low, more_high, more_holders) = extra
        j, low, high = np.concatenate([j, more_j]), np.concatenate([low, more_low]), np.concatenate([high, more_high])
        holders = np.concatenate([holders, more_holders])
    atoms = Atoms(first, members, class_b[j], low, high, holders, wanted[b[j]], lists, apart)
    _check_covered(before, after, b, j, atoms.volume)
    return atoms


def _lists(before: Table, after: Table) -> tuple[Lists, IntArray, IntArray]:
    """All different lists of ranks, and which of them every entry of both tables has."""
    values = np.concatenate([before.holder, after.holder])
    # `after` counts from 0; shifted by the length of what is before, its starts index the joined values
    start = np.concatenate([before.start, after.start[1:] + before.start[-1]])
    number, first = numbered_lists(values, start)
    lists = Lists(starts(np.diff(start)[first]), values[positions(start, first)])
    return lists, number[: len(before.tensor)], number[len(before.tensor) :]


def _classes(before: Table, after: Table, held: IntArray, wanted: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The class of every tensor, and the tensors of every class (by start and value)."""
    tensor = np.concatenate([before.tensor, after.tensor])
    low, high = np.concatenate([before.low, after.low]), np.concatenate([before.high, after.high])
    side = np.repeat([0, 1], [len(held), len(wanted)])
    # An entry gets a number by side, ranks and box. Tensors with equal lists of numbers are one class.
    entry, _ = numbered(side, np.concatenate([held, wanted]), *low.T, *high.T)
    # Equal sets of entries must give equal lists, so entries are sorted within each tensor
    order = np.lexsort([entry, tensor])
    count = np.bincount(tensor, minlength=len(before.space.tensors))
    klass, _ = numbered_lists(entry[order], starts(count))
    members = np.argsort(klass, kind="stable")
    return klass, starts(np.bincount(klass)), members


def _meet(
    class_a: IntArray, low_a: IntArray, high_a: IntArray, class_b: IntArray, low_b: IntArray, high_b: IntArray
) -> tuple[IntArray, IntArray]:
    """Pairs (i, j) of boxes of one class that have an element in common; j ascends."""
    if not len(class_a) or not len(class_b):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    # One number holds class and position, so a single search does for all classes
    # along the dimension that is cut most, boxes that may meet stand together in the order of where they begin
    dim = int(np.argmax([len(np.unique(low_a[:, d])) for d in range(low_a.shape[1])]))
    width = int(max(high_a[:, dim].max(), high_b[:, dim].max())) + 1
    order = np.argsort(class_a * width + low_a[:, dim], kind="stable")
    begins = (class_a * width + low_a[:, dim])[order]
    # Boxes that begin later may end earlier. The running maximum ascends, as a search needs; what it lets through is
    # dropped by `keep`.
    ends = np.maximum.accumulate((class_a * width + high_a[:, dim])[order])
    lo = np.searchsorted(ends, class_b * width + low_b[:, dim], side="right")
    hi = np.searchsorted(begins, class_b * width + high_b[:, dim], side="left")
    many = np.maximum(hi - lo, 0)
    j = np.repeat(np.arange(len(class_b)), many)
    i = order[np.repeat(lo, many) + within(many)]
    keep = ((low_a[i] < high_b[j]) & (low_b[j] < high_a[i])).all(1)
    return i[keep], j[keep]


def _cut_rough(
    before: Table, after: Table, a: IntArray, b: IntArray, rough_b: BoolArray, held: IntArray, lists: Lists
) -> tuple[Lists, tuple[IntArray, IntArray, IntArray, IntArray]]:
    """Cut classes whose boxes from before overlap in part, which no usual layout has: box by box."""
    by_tensor: dict[int, list[int]] = {}
    for k in a.tolist():
        by_tensor.setdefault(int(before.tensor[k]), []).append(k)
    # Numbers that atoms have already must stay as they are: new lists go behind the old ones
    known = {tuple(lists.of(k).tolist()): k for k in range(len(lists.start) - 1)}
    rows: list[tuple[int, tuple[int, ...], tuple[int, ...], int]] = []
    for j in np.flatnonzero(rough_b).tolist():
        # Parts of the wanted box, each with the ranks that hold it as far as boxes have been looked at
        left: list[tuple[Box, frozenset[int]]] = [(after.box(int(b[j])), frozenset())]
        for k in by_tensor.get(int(after.tensor[b[j]]), []):
            box, ranks = before.box(k), lists.of(int(held[k])).tolist()
            parts: list[tuple[Box, frozenset[int]]] = []
            for old, holders in left:
                common = old.intersect(box)
                if common is not None:
                    parts.append((common, holders | frozenset(ranks)))
                parts += [(rest, holders) for rest in old.subtract(box)]
            left = parts
        for box, holders in left:
            if holders:
                number = known.setdefault(tuple(sorted(holders)), len(known))
                rows.append((j, box.start, box.stop, number))
    dims = before.low.shape[1]
    many = list(known)
    grown = Lists(starts(np.array([len(m) for m in many])), np.array([r for m in many for r in m], dtype=np.int64))
    j_of = np.array([r[0] for r in rows], dtype=np.int64)
    # Tensors of fewer dimensions have 0:1 behind theirs, as in a table
    low = np.array([(*r[1], *(0,) * (dims - len(r[1]))) for r in rows], dtype=np.int64).reshape(-1, dims)
    high = np.array([(*r[2], *(1,) * (dims - len(r[2]))) for r in rows], dtype=np.int64).reshape(-1, dims)
    return grown, (j_of, low, high, np.array([r[3] for r in rows], dtype=np.int64))


def _check_covered(before: Table, after: Table, b: IntArray, j: IntArray, volume: IntArray) -> None:
    """Raise `LayoutError` for a box of `after` that atoms do not fill."""
    # Atoms of one box are apart, so they fill it exactly where their elements add up to it
    found = np.bincount(j, volume, len(b))
    short = np.flatnonzero(found != after.volume[b])
    if not len(short):
        return
    entry = int(b[short[0]])
    tensor = int(after.tensor[entry])
    gaps = [after.box(entry)]
    for k in np.flatnonzero(before.tensor == tensor).tolist():
        gaps = [rest for gap in gaps for rest in gap.subtract(before.box(k))]
    rank = int(after.holder[after.start[entry]])
    raise LayoutError(f"rank {rank} is to get {after.space.tensors[tensor].name}{gaps[0]}, which no rank holds")
