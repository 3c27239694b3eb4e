"""Where few hold a box and many miss it, ranks that receive it send it on.

Shape legend: M rows (a part of an atom that one rank misses), P ranks. The box is cut into about as many parts as ranks
miss it. Each part comes first to one of these ranks, which may send it to the others. Whether it or a holder sends is
chosen row by row, so that no port has more to do than it must. A rank takes in first what leaves its port about as busy
as the others of its node. Between nodes the same holds: a part enters each node once and is spread inside. It takes one
more message in a row than a direct way does; a chain from rank to rank would take as many as there are ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from prophet.spec import BoolArray, FloatArray, IntArray
from prophet.state.sources import PARTS, SLACK, Chosen, Rows, balanced, goals, parted, shares
from prophet.state.table import numbered, numbered_lists, starts

NEAR = 8.0
"""How much faster links within a node count as than those between nodes, where one is to be weighed against the other.

An A800 has 200 GB/s within its node and 25 GB/s out of it.
"""
# forwarding must save at least 2 % of the busiest port's time
_SHORTER = 0.98
# parts that are sent on are smaller than others: ports then send and take in about as much as each other
_FINER = 4
# More rows than this take too much time and memory to plan, so the direct route is taken
_MOST_ROWS = 4_000_000


def spread(missing: Rows, direct: Chosen, nodes: IntArray, members: IntArray, item_bytes: IntArray) -> Chosen:
    """Let ranks forward to each other where that relieves the busiest port.

    Args:
        missing: A row for every atom that a rank misses, uncut.
        direct: The same rows with a holder that sends each.
        nodes: Node of every rank, [P].
        members: Tensors, class by class.
        item_bytes: Bytes of an element of every tensor.

    Returns:
        The rows with forwarding; `direct` where it would not shorten the busiest port's time by `1 - _SHORTER`.
    """
    ranks = len(nodes)
    chosen = _scarce(missing, direct, nodes)[missing.atom] if len(missing) else np.zeros(0, dtype=bool)
    if not chosen.any():
        return direct
    # Between nodes a port has to take in no more than its share, as what comes in is spread inside of the node
    goal = np.repeat([goals(missing, ranks)[0], _incoming_bytes(missing, nodes)], ranks)
    some, rest = missing.taken(np.flatnonzero(chosen)), missing.taken(np.flatnonzero(~chosen))
    parts = _parts(some, goal[some.outside * ranks] / (PARTS * _FINER))
    if int(parts.sum()) > _MOST_ROWS:
        return direct
    some, number = parted(some, parts, members, item_bytes)
    rest, _ = parted(rest, np.minimum(rest.hi - rest.lo, shares(rest, goal)), members, item_bytes)
    far = rest.outside == 1
    some, feed, part = _passed_on(
        some, number, nodes, np.bincount(rest.destination[far], rest.n_bytes[far], ranks).astype(np.float64)
    )
    rows = some.with_more(rest)
    source = balanced(rows, goals(rows, ranks), np.zeros(2 * ranks))
    # A row has a feed only where the relay was chosen; a holder needs nothing before it sends
    on = np.where(source[: len(some)] == some.relay, feed, -1)
    together = _together(Chosen(some, source[: len(some)], on), part)
    found = Chosen(
        together.rows.with_more(rest),
        np.concatenate([together.source, source[len(some) :]]),
        np.concatenate([together.feed, np.full(len(rest), -1)]),
    )
    # Forwarding adds a message in a row, and rows; it must be worth that
    return found if _busiest(found, nodes) < _SHORTER * _busiest(direct, nodes) else direct


def _parts(rows: Rows, most_bytes: FloatArray) -> IntArray:
    """Into how many parts each row is cut so that many ranks can send on about as much each, [M].

    A group has as many parts as ranks that miss it, less those that hold it but for one, or a multiple: none is larger
    than `most_bytes` [M]. Of more than some dozens, it has as many as leave each rank `most_bytes` of it to send on: a
    small group that many miss would come in rows by the square of them. An atom has its share of the parts.
    """
    outside = rows.outside == 1
    takers = np.where(outside, np.bincount(rows.atom, rows.outside)[rows.atom], np.bincount(rows.atom)[rows.atom])
    # One part for every rank that lacks the atom, and one more where a single rank holds it
    lacking = np.ones(int(rows.atom.max()) + 1)
    np.maximum.at(lacking, rows.atom, takers + 1 - (rows.hi - rows.lo))
    heads = np.unique(rows.atom, return_index=True)[1]
    total = np.maximum(np.bincount(rows.group[heads], rows.n_bytes[heads])[rows.group], 1)
    large = total / np.maximum(most_bytes, 1)
    senders = np.minimum(lacking[rows.atom], np.maximum(PARTS * _FINER, np.ceil(lacking[rows.atom] * large)))
    many = senders * np.ceil(large / senders)
    most = np.zeros(len(lacking))
    np.maximum.at(most, rows.atom, many * rows.n_bytes / total)
    # Rounding errors must not make a part more of a whole number
    found: IntArray = np.ceil(most[rows.atom] - 1e-9).astype(np.int64)
    return found


def _together(chosen: Chosen, part: IntArray) -> Chosen:
    """Merge neighbouring parts whose rows have the same senders: parts of one tensor, then whole boxes of several."""
    for of_tensor in (True, False):
        rows, source, feed = chosen.rows, chosen.source, chosen.feed
        runs = _Runs.by(part)
        head, sources = runs.start, numbered_lists(source, np.append(runs.start, len(rows)))[0]
        alike = sources[1:] == sources[:-1]
        for column in (rows.atom, rows.first, rows.last) if of_tensor else (rows.atom, *rows.low.T, *rows.high.T):
            alike &= column[head][1:] == column[head][:-1]
        stays = np.append(True, ~alike)
        # A row is merged into the row at its place in the first of these parts
        first = np.flatnonzero(stays)[np.cumsum(stays) - 1]
        kept, row = stays[runs.of], np.arange(len(rows))
        into = (np.cumsum(kept) - 1)[head[first[runs.of]] + row - head[runs.of]]
        end = np.zeros(int(kept.sum()), np.int64)
        # numpy keeps the last of several values for one place: the end of the merged box
        end[into] = row
        n_bytes = np.bincount(into, rows.n_bytes).astype(np.int64)
        one = replace(rows.taken(np.flatnonzero(kept)), high=rows.high[end], last=rows.last[end], n_bytes=n_bytes)
        chosen = Chosen(one, source[kept], np.where(feed >= 0, into[feed], -1)[kept])
        part = part[kept]
    return chosen


def _incoming_bytes(missing: Rows, nodes: IntArray) -> float:
    """Mean bytes that the ports of the busiest node take in if everything comes from outside once."""
    far = missing.taken(np.flatnonzero(missing.outside))
    node = nodes[far.destination]
    once = numbered(far.atom, node)[1]
    ports = np.maximum(np.bincount(nodes), 1)
    return float((np.bincount(node[once], far.n_bytes[once], len(ports)) / ports).max())


def _scarce(missing: Rows, direct: Chosen, nodes: IntArray) -> BoolArray:
    """Atoms that a full port has to send, or that several ranks of one node take from outside: by number."""
    ranks = len(nodes)
    rows = direct.rows
    port = rows.outside * ranks + direct.source
    load = np.bincount(port, rows.n_bytes, 2 * ranks)
    found = np.zeros(int(missing.atom.max()) + 1, dtype=bool)
    # A port above its goal is what forwarding can relieve
    found[rows.atom[(load > SLACK * goals(missing, ranks))[port]]] = True
    # What several ranks of a node take from outside would cross the slow links several times
    entering = np.flatnonzero(missing.outside)
    pair, first = numbered(missing.atom[entering], nodes[missing.destination[entering]])
    found[missing.atom[entering[first[np.bincount(pair, minlength=len(first)) > 1]]]] = True
    # With a single rank that misses an atom there is nobody to forward to
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


def _passed_on(rows: Rows, number: IntArray, nodes: IntArray, comes_in: FloatArray) -> tuple[Rows, IntArray, IntArray]:
    """The rows in another order, with ranks that could send them on; the rows by which those get them (or -1); parts.

    Of the ranks of a node that miss a part, one gets it first. If it comes from outside, all the others get it from
    that one; if a rank of the node holds it, they may. `comes_in` [P] comes to ranks from outside anyway.
    """
    part, _ = numbered(rows.atom, number)
    order = np.lexsort([rows.destination, nodes[rows.destination], -rows.outside, part, rows.group])
    rows, part = rows.taken(order), part[order]
    outside = rows.outside == 1
    parts, inside = _Runs.by(part), _Runs.by(part, nodes[rows.destination])
    entry = _entries(rows, inside, nodes, comes_in)
    # of the nodes that a part has to enter, the first one's rank may send it to the others'
    enters = np.bincount(parts.of[inside.start], outside[inside.start], len(parts.start)).astype(np.int64)
    # The ranks that get a part first in a node send it to other nodes in turn, so that each sends about as much
    turns = np.maximum(enters, 1) * inside.length[inside.of[parts.start]]
    place = (_middles(rows.group[parts.start], rows.n_bytes[parts.start]) * turns).astype(np.int64)
    first = entry[inside.of[parts.start] + place % np.maximum(enters, 1)]
    row = np.arange(len(rows))
    is_entry = entry[inside.of] == row
    feed = np.where(is_entry, np.where(outside & (first[parts.of] != row), first[parts.of], -1), entry[inside.of])
    # Once a part has entered the node, its other ranks are served from inside: no holder is left for them
    mates = outside & ~is_entry
    found = replace(
        rows,
        relay=np.where(feed >= 0, rows.destination[feed], -1),
        hi=np.where(mates, rows.lo, rows.hi),
        outside=np.where(mates, 0, rows.outside),
    )
    return found, feed, part


def _entries(rows: Rows, inside: _Runs, nodes: IntArray, comes_in: FloatArray) -> IntArray:
    """The row by which a part comes to each node first, [runs]: so that all ports of the node take in about as much."""
    start, ranks = inside.start, len(nodes)
    same, first = numbered(rows.group[start], nodes[rows.destination[start]])
    # Which rank of a node a part enters by is the same question as who sends a row: so ranks that could take it in
    # stand where holders do
    heads = replace(
        rows.taken(start),
        lo=start[first][same],
        hi=(start + inside.length)[first][same],
        relay=np.full(len(start), -1),
        values=rows.destination,
    )
    fixed = np.concatenate([np.zeros(ranks), comes_in])
    load = fixed + np.bincount(heads.outside * ranks + heads.destination, heads.n_bytes, 2 * ranks)
    ports = np.maximum(np.bincount(nodes), 1)
    goal = np.repeat([(np.bincount(nodes, part) / ports).max() for part in np.split(load, 2)], ranks)
    taker = balanced(heads, goal, fixed)
    key = inside.of * ranks + rows.destination
    found: IntArray = np.searchsorted(key, np.arange(len(start)) * ranks + taker)
    return found


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
            # Links within a node are faster: a byte there counts less
            found = max(found, weight * float(np.bincount(end[kind], chosen.rows.n_bytes[kind], ranks).max()))
    return found
