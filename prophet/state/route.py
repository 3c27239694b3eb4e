"""Routes from one layout to another: the exact transfers, by box intersection.

Shape legend: P ranks. Rank i sends the union over j of held(i) with wanted(j) minus held(j), and every piece that j
misses has one owner. (DynaTran's printed send set, what i holds and no longer wants, sends nothing when a copy is
added.) So the bytes on the wire are the bytes that some rank misses, none twice. Where few hold a box, ranks that have
got it send it on. A route is arrays; transfers are values that are made for those who ask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from prophet.errors import LayoutError, SpecError
from prophet.spec import IntArray
from prophet.state.atoms import Atoms, cut
from prophet.state.forward import spread
from prophet.state.layout import Layout
from prophet.state.sources import Rows, choose, missing_rows
from prophet.state.space import Box, Space
from prophet.state.table import box_of, numbered, positions_of, volumes


@dataclass(frozen=True, slots=True)
class Transfer:
    """One box of one tensor goes from one rank to another.

    Attributes:
        name: The tensor.
        box: Its part.
        source: Rank that sends it.
        destination: Rank that receives it.
        hop: How often it has been sent before; 0 where the source held it under the old layout.
    """

    name: str
    box: Box
    source: int
    destination: int
    hop: int = 0

    def __str__(self) -> str:
        return f"{self.name}{self.box} {self.source}->{self.destination}"


@dataclass(frozen=True, eq=False)
class Route:
    """All transfers from one layout to another, in an order that every rank derives alike.

    Attributes:
        before: The old layout.
        after: The new one.
        nodes: Node of every rank, [P].
        atoms: The boxes of which every rank holds all or nothing.
        rows: What ranks miss.
        source: Rank that sends each row, [rows].
        feed: The row by which the source gets it; -1 where it has held it, [rows].
    """

    before: Layout
    after: Layout
    nodes: IntArray
    atoms: Atoms
    rows: Rows
    source: IntArray
    feed: IntArray

    @property
    def space(self) -> Space:
        """The tensors, the same in both layouts."""
        return self.before.space

    @property
    def ranks(self) -> int:
        """Number of ranks, P."""
        return self.before.ranks

    def n_bytes(self, transfer: Transfer) -> int:
        """Bytes of one transfer."""
        return transfer.box.elements * self.space[transfer.name].item_bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes that cross between ranks."""
        return int(self.rows.n_bytes.sum())

    # `bincount` adds weights up in float64, which counts bytes exactly up to 2 ** 53
    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes every rank sends, [P]."""
        return tuple(np.bincount(self.source, self.rows.n_bytes, self.ranks).astype(np.int64).tolist())

    def received_bytes(self) -> tuple[int, ...]:
        """Bytes every rank receives, [P]."""
        return tuple(np.bincount(self.rows.destination, self.rows.n_bytes, self.ranks).astype(np.int64).tolist())

    @cached_property
    def link_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes by sending and receiving rank."""
        pair, first = numbered(self.source, self.rows.destination)
        n_bytes = np.bincount(pair, self.rows.n_bytes, len(first)).astype(np.int64)
        ends = zip(self.source[first].tolist(), self.rows.destination[first].tolist(), strict=True)
        return {end: size for end, size in zip(ends, n_bytes.tolist(), strict=True) if size}

    @cached_property
    def hop(self) -> IntArray:
        """How often each row has been sent before, [rows]."""
        found = np.zeros(len(self.rows), np.int64)
        on = np.flatnonzero(self.feed >= 0)
        for _ in range(len(self.rows)):
            # Feeds form chains: each pass settles the rows that are one hop further on, and a pass without change ends
            # it
            later = found[self.feed[on]] + 1
            if (later == found[on]).all():
                break
            found[on] = later
        return found

    def streams(self, waves: IntArray | None = None) -> tuple[IntArray, IntArray]:
        """Sum up what is sent together: between two ranks, in one hop and wave.

        Args:
            waves: Wave of every tensor, [tensors]; None: all are in wave 0.

        Returns:
            Source, destination, hop and wave of every stream, [S, 4], and its bytes, [S].
        """
        row, n_bytes, wave = np.arange(len(self.rows)), self.rows.n_bytes, np.zeros(len(self.rows), np.int64)
        if waves is not None:
            many = self.rows.last - self.rows.first
            tensor = self.atoms.members[positions_of(self.rows.first, many)]
            row = np.repeat(row, many)
            n_bytes = volumes(self.rows.low, self.rows.high)[row] * self.space.item_bytes[tensor]
            wave = waves[tensor]
        keys = np.stack([self.source[row], self.rows.destination[row], self.hop[row], wave], axis=1)
        of, first = numbered(*keys.T)
        return keys[first], np.bincount(of, n_bytes, len(first)).astype(np.int64)

    def widest_item_bytes(self) -> int:
        """Bytes of the widest element that travels; 1 where nothing does."""
        many = len(self.atoms.members) + 1
        # Rows are ranges of members. Counting where ranges begin and end finds which members are in any, without
        # listing them
        begun, ended = np.bincount(self.rows.first, minlength=many), np.bincount(self.rows.last, minlength=many)
        travels = np.cumsum(begun - ended)[:-1] > 0
        return int(self.space.item_bytes[self.atoms.members[travels]].max(initial=1))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Every transfer, by tensor, box and destination."""
        return self._transfers(np.arange(len(self.rows)))

    def sends(self, rank: int) -> tuple[Transfer, ...]:
        """Transfers from `rank`, by tensor and box: each of its peers receives in this order."""
        return self._transfers(np.flatnonzero(self.source == rank))

    def receives(self, rank: int) -> tuple[Transfer, ...]:
        """Transfers to `rank`, by tensor and box: each of its peers sends in this order."""
        return self._transfers(np.flatnonzero(self.rows.destination == rank))

    def _transfers(self, rows: IntArray) -> tuple[Transfer, ...]:
        """These rows as transfers: by tensor, box, destination and source."""
        many = (self.rows.last - self.rows.first)[rows]
        tensor = self.atoms.members[positions_of(self.rows.first[rows], many)]
        row = np.repeat(rows, many)
        low, destination = self.rows.low[row], self.rows.destination[row]
        # Both ends of a pair list their transfers in this order
        order = np.lexsort([self.source[row], destination, *low.T[::-1], tensor])
        return tuple(
            Transfer(
                self.space.tensors[t].name,
                box_of(self.space, t, self.rows.low[r], self.rows.high[r]),
                source,
                target,
                hop,
            )
            for t, r, source, target, hop in zip(
                tensor[order].tolist(),
                row[order].tolist(),
                self.source[row][order].tolist(),
                destination[order].tolist(),
                self.hop[row][order].tolist(),
                strict=True,
            )
        )

    def digest(self) -> int:
        """62 bits that differ where spaces, layouts or transfers do; ranks compare them before they move anything."""
        tensors = [(t.name, t.shape, t.dtype, t.kind, t.layer) for t in self.space.tensors]
        found = hashlib.blake2b(repr(tensors).encode(), digest_size=8)
        for table in (self.before.table, self.after.table):
            for part in (table.tensor, table.low, table.high, table.start, table.holder):
                found.update(np.ascontiguousarray(part).tobytes())
        for part in (
            self.rows.first,
            self.rows.last,
            self.rows.low,
            self.rows.high,
            self.rows.destination,
            self.source,
            self.feed,
        ):
            found.update(np.ascontiguousarray(part).tobytes())
        # A positive int64, as it travels in a tensor
        return int.from_bytes(found.digest(), "little") >> 2


def route(before: Layout, after: Layout, *, nodes: Sequence[int] | None = None, forward: bool = True) -> Route:
    """Find the transfers that turn `before` into `after`.

    A missing piece comes from the same node if it can. Of several ranks that could send it, it comes from those that
    have least to send, in parts where that helps.

    Args:
        before: The layout that is there.
        after: The layout that is wanted, of the same space and as many ranks.
        nodes: Node of every rank, [P]; None: all are on one.
        forward: Whether ranks that miss a piece may send it on to each other. They do where holders would have more to
            send than ranks receive.

    Raises:
        LayoutError: The layouts do not match, or a piece that `after` wants lives nowhere.
        SpecError: `nodes` has another length.
    """
    # A route does not know how to make, drop or cast tensors: it moves boxes of the same ones
    if before.space != after.space or before.ranks != after.ranks:
        raise LayoutError(
            f"both layouts must be of one space and one number of ranks, got {before.ranks} and {after.ranks} ranks"
        )
    if nodes is not None and len(nodes) != before.ranks:
        raise SpecError(f"nodes needs one entry per rank ({before.ranks}), got {len(nodes)}")
    node = np.zeros(before.ranks, np.int64) if nodes is None else np.asarray(nodes, dtype=np.int64)
    # Every rank finds the route alone. So all that follows counts in integers and breaks ties by index
    atoms = cut(before.table, after.table)
    sizes = before.space.item_bytes
    missing = missing_rows(atoms, node, sizes)
    direct = choose(missing, before.ranks, atoms.members, sizes)
    chosen = spread(missing, direct, node, atoms.members, sizes) if forward else direct
    return Route(before, after, node, atoms, chosen.rows, chosen.source, chosen.feed)
