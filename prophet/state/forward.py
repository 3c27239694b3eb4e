"""Where few hold a box and many miss it, ranks that receive it send it on.

Shape legend: M rows (a part of an atom that one rank misses), P ranks. The box is cut into as many parts as ranks miss
it. Each part leaves its holders once, for another of these ranks, which sends it to the others. So a port sends about
as much as a rank receives, however many there are. It takes one more message in a row than a direct way does; a chain
from rank to rank would take as many as there are ranks. Between nodes the same holds: a part enters each node once and
is spread inside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prophet.spec import BoolArray, FloatArray, IntArray
from prophet.state.sources import SLACK, Chosen, Rows, balanced, goals, parted, shares
from prophet.state.table import numbered, starts

NEAR = 8.0
"""How much faster links within a node count as than those between nodes, where one is to be weighed against the other.

An A800 has 200 GB/s within its node and 25 GB/s out of it.
"""
_SHORTER = 0.98  # forwarding must save at least 2 % of the busiest port's time
_MOST_ROWS = 4_000_000


def spread(missing: Rows, direct: Chosen, nodes: IntArray, members: IntArray, item_bytes: IntArray) -> Chosen:
    """The rows with forwarding where that relieves the busiest port; `direct` where it does not."""
    ranks = len(nodes)
    chosen = _scarce(missing, direct, nodes)[missing.atom] if len(missing) else np.zeros(0, dtype=bool)
    if not chosen.any():
        return direct
    goal = goals(missing, ranks)
    some, rest = missing.taken(np.flatnonzero(chosen)), missing.taken(np.flatnonzero(~chosen))
    takers = np.bincount(some.atom)
    heads = np.unique(some.atom, return_index=True)[1]
    total = np.bincount(some.group[heads], some.n_bytes[heads])
    parts = np.ceil(some.n_bytes * takers[some.atom] / np.maximum(total[some.group], 1)).astype(np.int64)
    parts = np.minimum(parts, takers[some.atom])
    if int(parts.sum()) > _MOST_ROWS:
        return direct
    some, number = parted(some, parts, members, item_bytes)
    some, feed = _passed_on(some, number, nodes)
    rest, _ = parted(rest, np.minimum(rest.hi - rest.lo, shares(rest, goal)), members, item_bytes)
    rows = some.with_more(rest)
    feed = np.concatenate([feed, np.full(len(rest), -1)])
    on = np.flatnonzero(feed >= 0)
    source = np.zeros(len(rows), np.int64)
    source[on] = rows.destination[feed[on]]
    far = nodes[source[on]] != nodes[rows.destination[on]]
    held = np.flatnonzero(feed < 0)
    fixed = np.bincount(far * ranks + source[on], rows.n_bytes[on], 2 * ranks).astype(np.float64)
    source[held] = balanced(rows.taken(held), goal, fixed)
    found = Chosen(rows, source, feed)
    return found if _busiest(found, nodes) < _SHORTER * _busiest(direct, nodes) else direct


def _scarce(missing: Rows, direct: Chosen, nodes: IntArray) -> BoolArray:
    """Atoms that a full port has to send, or that several ranks of one node take from outside: by number."""
    ranks = len(nodes)
    rows = direct.rows
    port = rows.outside * ranks + direct.source
    load = np.bincount(port, rows.n_bytes, 2 * ranks)
    found = np.zeros(int(missing.atom.max()) + 1, dtype=bool)
    found[rows.atom[(load > SLACK * goals(missing, ranks))[port]]] = True
    entering = np.flatnonzero(missing.outside)
    pair, first = numbered(missing.atom[entering], nodes[missing.destination[entering]])
    found[missing.atom[entering[first[np.bincount(pair, minlength=len(first)) > 1]]]] = True
    return found & (np.bincount(missing.atom) > 1)


@dataclass(frozen=True, eq=False)
class _Runs:
    """Neighbouring rows of equal keys: where each run begins, how long it is, and the run of every row."""

    start: IntArray
    length: IntArray
    of: IntArray

    @classmethod
    def by(cls, *keys: IntArray) -> _Runs:
        new = np.ones(len(keys[0]), dtype=bool)
        new[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
        start = np.flatnonzero(new)
        return cls(start, np.diff(np.append(start, len(new))), np.cumsum(new) - 1)


def _passed_on(rows: Rows, number: IntArray, nodes: IntArray) -> tuple[Rows, IntArray]:
    """The rows in another order, and the row that each is fed by; -1 where a holder sends it."""
    part, _ = numbered(rows.atom, number)
    order = np.lexsort([rows.destination, nodes[rows.destination], -rows.outside, part, rows.group])
    rows, part = rows.taken(order), part[order]
    many, outside = rows.hi - rows.lo, rows.outside.astype(bool)
    parts = _Runs.by(part)
    inside = _Runs.by(part, nodes[rows.destination])
    middle = _middles(rows.group[parts.start], rows.n_bytes[parts.start])
    entering = np.bincount(parts.of, rows.outside).astype(np.int64)
    # one rank of all that miss the part outside, and one of every node
    first = parts.start + (middle * entering).astype(np.int64)
    entry = inside.start + (middle[parts.of[inside.start]] * inside.length).astype(np.int64)
    has_first = np.flatnonzero(entering)
    entry[inside.of[first[has_first]]] = first[has_first]
    to_enter = np.bincount(parts.of[inside.start], rows.outside[inside.start]).astype(np.int64)
    row = np.arange(len(rows))
    is_entry = entry[inside.of] == row
    relayed = is_entry & outside & (to_enter[parts.of] > many) & (first[parts.of] != row)
    mates = ~is_entry & (outside | (inside.length[inside.of] > many))
    return rows, np.where(relayed, first[parts.of], np.where(mates, entry[inside.of], -1))


def _middles(group: IntArray, n_bytes: IntArray) -> FloatArray:
    """Where the middle of each part lies if those of its group are laid end to end: from 0 to 1."""
    runs = _Runs.by(group)
    upto = starts(n_bytes)
    total = upto[runs.start + runs.length] - upto[runs.start]
    found: FloatArray = (upto[:-1] - upto[runs.start][runs.of] + n_bytes / 2) / np.maximum(total, 1)[runs.of]
    return found


def _busiest(chosen: Chosen, nodes: IntArray) -> float:
    """Bytes of the busiest port, those within nodes over `NEAR`."""
    ranks, found = len(nodes), 0.0
    far = nodes[chosen.source] != nodes[chosen.rows.destination]
    for kind, weight in ((far, 1.0), (~far, 1 / NEAR)):
        for end in (chosen.source, chosen.rows.destination):
            found = max(found, weight * float(np.bincount(end[kind], chosen.rows.n_bytes[kind], ranks).max()))
    return found
