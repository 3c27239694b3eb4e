"""Who sends what: every missing box gets a holder, nearest first, so that no rank sends much more than the others.

Shape legend: M rows (a part of an atom that one rank misses), P ranks. A rank has two ports, one towards its node and
one out of it. Of the ranks that could send a row, all are on the destination's node, or none is. They hold it, or they
miss it too and can send it on (`prophet.state.forward`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from prophet.spec import FloatArray, IntArray
from prophet.state.atoms import Atoms
from prophet.state.table import numbered, positions, positions_of, starts, volumes, within

PARTS = 8
"""Into how many parts the busiest port's bytes are cut where several ranks could send them."""
# Passes at most; one that finds nothing to move ends them
_ROUNDS = 24
# A port may have this many times its goal, as whole boxes never add up to it exactly
SLACK = 1.01


@dataclass(frozen=True, eq=False)
class Rows:
    """Missing boxes: row m is a box of some tensors of one class, within one atom. All but `values` are [M, ...].

    Ranks that could send it are values[lo[m]:hi[m]], and relay[m], which gets it first, where that is not -1. A `pick`
    counts them in this order.

    Attributes:
        atom: Which atom.
        group: A number, equal for atoms that the same ranks hold and the same want.
        first: The first of the class's members.
        last: The one behind the last.
        low: Where the box begins, [M, D].
        high: Where it ends, [M, D].
        destination: Rank that misses it.
        lo: Where its holders begin in `values`.
        hi: Where they end.
        outside: 1 where no rank of the destination's node holds it.
        n_bytes: Bytes of the row.
        relay: Rank that could send it on; -1: none.
        values: Ranks, to which `lo` and `hi` point.
    """

    atom: IntArray
    group: IntArray
    first: IntArray
    last: IntArray
    low: IntArray
    high: IntArray
    destination: IntArray
    lo: IntArray
    hi: IntArray
    outside: IntArray
    n_bytes: IntArray
    relay: IntArray
    values: IntArray

    def __len__(self) -> int:
        return len(self.atom)

    @property
    def choices(self) -> IntArray:
        """How many ranks could send each row, [M]."""
        return self.hi - self.lo + (self.relay >= 0)

    def taken(self, rows: IntArray) -> Rows:
        """Some of the rows, in this order; a row may be taken several times."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _COLUMNS})

    def with_more(self, more: Rows) -> Rows:
        """These rows and then `more`, which have the same `values`."""
        both = {name: np.concatenate([getattr(self, name), getattr(more, name)]) for name in _COLUMNS}
        return replace(self, **both)


_COLUMNS = ("atom", "group", "first", "last", "low", "high", "destination", "lo", "hi", "outside", "n_bytes", "relay")


@dataclass(frozen=True, eq=False)
class Chosen:
    """Rows with who sends each.

    Attributes:
        rows: The rows.
        source: Rank that sends each, [M].
        feed: The row that brings it to the source first; -1: the source has held it, [M].
    """

    rows: Rows
    source: IntArray
    feed: IntArray


def missing_rows(atoms: Atoms, nodes: IntArray, item_bytes: IntArray) -> Rows:
    """List a row for every rank that wants an atom and does not hold it.

    Args:
        atoms: What the new layout wants, in boxes of which every rank holds all or nothing.
        nodes: Node of every rank, [P].
        item_bytes: Bytes of an element of every tensor.
    """
    ranks, lists = len(nodes), atoms.lists
    pair, first = numbered(atoms.holders, atoms.takers)
    held, wanted = atoms.holders[first], atoms.takers[first]
    # Many atoms have the same two lists of ranks, so who lacks what is found once for each pair of lists
    many = lists.start[wanted + 1] - lists.start[wanted]
    taker = lists.values[positions(lists.start, wanted)]
    of_pair = np.repeat(np.arange(len(first)), many)
    number = np.repeat(np.arange(len(lists.start) - 1), np.diff(lists.start))
    there = number * ranks + lists.values
    lacks = ~np.isin(held[of_pair] * ranks + taker, there)
    of_pair, taker = of_pair[lacks], taker[lacks]
    # holders of a list, those of one node side by side
    order = np.lexsort([lists.values, nodes[lists.values], number])
    values = lists.values[order]
    width = int(nodes.max()) + 1
    on_node = (number * width + nodes[lists.values])[order]
    near = held[of_pair] * width + nodes[taker]
    lo, hi = np.searchsorted(on_node, near, side="left"), np.searchsorted(on_node, near, side="right")
    far = lo == hi
    # Holders on the destination's node are the only choice where there are any: links within a node are faster
    lo, hi = np.where(far, lists.start[held[of_pair]], lo), np.where(far, lists.start[held[of_pair] + 1], hi)
    # every atom of the pair is missing at these takers
    start = starts(np.bincount(of_pair, minlength=len(first)))
    atom = np.repeat(np.arange(len(pair)), np.diff(start)[pair])
    at = positions(start, pair)
    klass = atoms.klass[atom]
    one = atoms.class_bytes(item_bytes)[klass] if len(klass) else klass
    return Rows(
        atom=atom,
        group=pair[atom] if len(atom) else atom,
        first=atoms.first[klass],
        last=atoms.first[klass + 1],
        low=atoms.low[atom],
        high=atoms.high[atom],
        destination=taker[at],
        lo=lo[at],
        hi=hi[at],
        outside=far[at].astype(np.int64),
        n_bytes=atoms.volume[atom] * one,
        relay=np.full(len(atom), -1),
        values=values,
    )


def choose(rows: Rows, ranks: int, members: IntArray, item_bytes: IntArray) -> Chosen:
    """Let each row be sent by a rank that has held it all along; large rows are cut and shared out.

    Args:
        rows: What ranks miss.
        ranks: Number of ranks.
        members: Tensors, class by class.
        item_bytes: Bytes of an element of every tensor.
    """
    goal = goals(rows, ranks)
    many = rows.hi - rows.lo
    # More parts than holders would not level anything
    rows, _ = parted(rows, np.minimum(many, shares(rows, goal)), members, item_bytes)
    source = balanced(rows, goal, np.zeros(2 * ranks))
    return Chosen(rows, source, np.full(len(rows), -1))


def balanced(rows: Rows, goal: FloatArray, fixed: FloatArray) -> IntArray:
    """Choose who sends each row, so that ports are above their goals as little as can be.

    Args:
        rows: What is to be sent.
        goal: Bytes that each port may send, [2 P]: ports towards the node, then those out of it.
        fixed: Bytes that each port sends anyway, [2 P].

    Returns:
        The rank that sends each row, [M].
    """
    if not len(rows):
        return np.zeros(0, np.int64)
    ranks = len(goal) // 2
    order = np.lexsort([rows.destination, rows.hi, rows.lo])
    rows = rows.taken(order)
    port, free = rows.outside * ranks + _shared_out(rows), np.flatnonzero(rows.choices > 1)
    load = fixed + np.bincount(port, rows.n_bytes, 2 * ranks)
    # What a port has to send in any case cannot be moved: its goal is at least that
    goal = np.maximum(goal, load - np.bincount(port[free], rows.n_bytes[free], 2 * ranks))
    for _ in range(_ROUNDS):
        moved, target = _relieved(rows, free, port, load, goal * SLACK)
        if not len(moved):
            break
        for change, at in ((-rows.n_bytes[moved], port[moved]), (rows.n_bytes[moved], target)):
            load += np.bincount(at, change, 2 * ranks)
        port[moved] = target
    found = np.zeros(len(rows), np.int64)
    found[order] = port % ranks
    return found


def goals(rows: Rows, ranks: int) -> FloatArray:
    """Bytes that every port may send, [2 P]: what the busiest port of its kind must take in."""
    goal = np.zeros(2 * ranks)
    for kind in (0, 1):
        mine = rows.outside == kind
        taken_in = np.bincount(rows.destination[mine], rows.n_bytes[mine], ranks)
        goal[kind * ranks : (kind + 1) * ranks] = taken_in.max() if mine.any() else 0
    return goal


def shares(rows: Rows, goal: FloatArray) -> IntArray:
    """The number of parts in which each row would be small beside a port's bytes, [M]."""
    most = np.maximum(goal[rows.outside * (len(goal) // 2)] / PARTS, 1)
    found: IntArray = np.ceil(rows.n_bytes / most).astype(np.int64)
    return found


def parted(rows: Rows, parts: IntArray, members: IntArray, item_bytes: IntArray) -> tuple[Rows, IntArray]:
    """Cut rows into parts, as far as they can be cut: by tensors, then by box.

    Args:
        rows: The rows.
        parts: Into how many parts each is to be cut, [M].
        members: Tensors, class by class.
        item_bytes: Bytes of an element of every tensor.

    Returns:
        The parts, and each one's number among those of its row.
    """
    if not len(rows):
        return rows, parts
    tensors = rows.last - rows.first
    upto = starts(item_bytes[members])
    each, inner = np.maximum(np.minimum(parts, tensors), 1), np.maximum(-(-parts // tensors), 1)
    if (each * inner > 1).any():
        k, n = within(each), np.repeat(each, each)
        row = np.repeat(np.arange(len(rows)), each)
        first, many, inner = rows.first[row], tensors[row], inner[row]
        rows = replace(rows.taken(row), first=first + many * k // n, last=first + many * (k + 1) // n)
        # Along the longest dimension, most parts can be had
        longest = np.argmax(rows.high - rows.low, axis=1)
        length = (rows.high - rows.low)[np.arange(len(rows)), longest]
        inner = np.maximum(np.minimum(inner, length), 1)
        k, n, of = within(inner), np.repeat(inner, inner), np.repeat(np.arange(len(rows)), inner)
        rows, row, dim, length = rows.taken(of), row[of], longest[of], length[of]
        every, low, high = np.arange(len(rows)), rows.low.copy(), rows.high.copy()
        low[every, dim] = rows.low[every, dim] + length * k // n
        high[every, dim] = rows.low[every, dim] + length * (k + 1) // n
        n_bytes = volumes(low, high) * (upto[rows.last] - upto[rows.first])
        return replace(rows, low=low, high=high, n_bytes=n_bytes), within(np.bincount(row))
    return rows, np.zeros_like(parts)


def _shared_out(rows: Rows) -> IntArray:
    """Choose who sends each row at first: rows with the same holders go to these in turn, in equal shares of bytes."""
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (rows.lo[1:] != rows.lo[:-1]) | (rows.hi[1:] != rows.hi[:-1])
    group = np.cumsum(new) - 1
    upto = np.cumsum(rows.n_bytes)
    before = upto - rows.n_bytes
    offset = before[np.flatnonzero(new)][group]
    total = np.maximum(np.bincount(group, rows.n_bytes)[group], 1)
    middle = (before - offset + rows.n_bytes / 2) / total
    many = rows.hi - rows.lo
    # Rounding may put the last middle at 1
    pick = np.minimum((middle * many).astype(np.int64), many - 1)
    return np.where(many > 0, rows.values[rows.lo + pick], rows.relay)


def _relieved(
    rows: Rows, free: IntArray, port: IntArray, load: FloatArray, goal: FloatArray
) -> tuple[IntArray, IntArray]:
    """Move some of the `free` rows from ports above the goal, each to the least loaded port with room.

    Returns:
        The rows, and their new ports.
    """
    movable = free[(load > goal)[port[free]]]
    # A full port gives up the rows beyond its goal. Rows sorted first keep their place: what cannot move, then what
    # only holders can send
    order = movable[np.lexsort([rows.relay[movable] >= 0, port[movable]])]
    fixed = load - np.bincount(port[order], rows.n_bytes[order], len(load))
    reached = _running(port[order], rows.n_bytes[order]) + fixed[port[order]]
    over = order[reached > goal[port[order]]]
    if not len(over):
        return over, over
    target = _least_loaded(rows, over, load)
    # Without this, a row that is larger than any room would go to and fro
    better = load[target] + rows.n_bytes[over] < load[port[over]]
    over, target = over[better], target[better]
    by_target = np.argsort(target, kind="stable")
    room = _running(target[by_target], rows.n_bytes[over][by_target]) + load[target[by_target]]
    # One row per target goes in any case: it was found better, and a row larger than the goal would fit nowhere
    first = np.ones(len(by_target), dtype=bool)
    first[1:] = target[by_target][1:] != target[by_target][:-1]
    fits = by_target[(room <= goal[target[by_target]]) | first]
    return over[fits], target[fits]


def _least_loaded(rows: Rows, some: IntArray, load: FloatArray) -> IntArray:
    """The least loaded port of each of these rows.

    Of equal ones it is the first counted from the row's own place, so that rows do not all turn to one.
    """
    ranks, outside = len(load) // 2, rows.outside[some]
    # Thousands of rows share a list of holders: it is searched once, not once for each of them
    of, first = numbered(rows.lo[some], rows.hi[some], outside)
    lengths = (rows.hi - rows.lo)[some[first]]
    begin = starts(lengths)
    ports = rows.values[positions_of(rows.lo[some[first]], lengths)] + np.repeat(outside[first] * ranks, lengths)
    least = np.minimum.reduceat(load[ports], begin[:-1])
    able = np.flatnonzero(load[ports] == np.repeat(least, lengths))
    heads = np.searchsorted(able, begin)
    at = np.searchsorted(able, begin[of] + some % rows.choices[some])
    around = at == heads[of + 1]  # none from the row's place on; a relay stands behind the list
    relay = rows.relay[some]
    relayed = np.where(relay >= 0, load[outside * ranks + relay], np.inf)
    passed_on = (relayed < least[of]) | ((relayed == least[of]) & around)
    return np.where(passed_on, outside * ranks + relay, ports[able[np.where(around, heads[of], at)]])


def _running(key: IntArray, values: IntArray) -> IntArray:
    """Sums of `values` up to and with each, within runs of equal `key`."""
    upto = np.cumsum(values)
    new = np.ones(len(key), dtype=bool)
    new[1:] = key[1:] != key[:-1]
    at = np.flatnonzero(new)
    found: IntArray = upto - (upto - values)[at][np.cumsum(new) - 1]
    return found
