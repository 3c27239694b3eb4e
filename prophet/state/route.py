"""Routes from one layout to another: the exact transfers, by box intersection.

Shape legend: P ranks. Rank i sends the union over j of held(i) with wanted(j) minus held(j), and every piece that j
misses has one owner. (DynaTran's printed send set, what i holds and no longer wants, sends nothing when a copy is
added.) So the bytes on the wire are the bytes that some rank misses, none twice. A route is arrays; transfers are
values that are made for those who ask.
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
from prophet.state.layout import Layout, Piece
from prophet.state.sources import Rows, choose, missing_rows
from prophet.state.space import Box, Space
from prophet.state.table import box_of, positions_of


@dataclass(frozen=True, slots=True)
class Transfer:
    """One box of one tensor goes from rank `source` to rank `destination`."""

    name: str
    box: Box
    source: int
    destination: int

    def __str__(self) -> str:
        return f"{self.name}{self.box} {self.source}->{self.destination}"


@dataclass(frozen=True, eq=False)
class Route:
    """All transfers from layout `before` to layout `after`, in an order that every rank derives alike.

    rows: what ranks miss. source: who sends it, [rows]. nodes: the node of every rank, [P].
    """

    before: Layout
    after: Layout
    nodes: IntArray
    atoms: Atoms
    rows: Rows
    source: IntArray

    @property
    def space(self) -> Space:
        return self.before.space

    @property
    def ranks(self) -> int:
        return self.before.ranks

    def n_bytes(self, transfer: Transfer) -> int:
        """Bytes of one transfer."""
        return transfer.box.elements * self.space[transfer.name].item_bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes that cross between ranks."""
        return int(self.rows.n_bytes.sum())

    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes every rank sends, [P]."""
        return tuple(np.bincount(self.source, self.rows.n_bytes, self.ranks).astype(np.int64).tolist())

    def received_bytes(self) -> tuple[int, ...]:
        """Bytes every rank receives, [P]."""
        return tuple(np.bincount(self.rows.destination, self.rows.n_bytes, self.ranks).astype(np.int64).tolist())

    def stream_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes that a rank sends to another, by the two of them; no pair without any."""
        pairs, of = np.unique(self.source * self.ranks + self.rows.destination, return_inverse=True)
        sums = np.bincount(of, self.rows.n_bytes, len(pairs)).astype(np.int64)
        return {divmod(pair, self.ranks): n for pair, n in zip(pairs.tolist(), sums.tolist(), strict=True)}

    def widest_item_bytes(self) -> int:
        """Bytes of the widest element that travels; 1 where nothing does."""
        many = len(self.atoms.members) + 1
        begun, ended = np.bincount(self.rows.first, minlength=many), np.bincount(self.rows.last, minlength=many)
        travels = np.cumsum(begun - ended)[:-1] > 0
        return int(self.space.item_bytes[self.atoms.members[travels]].max(initial=1))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Every transfer, by tensor, box and destination."""
        return self._transfers(np.arange(len(self.rows)))

    def sends(self, rank: int) -> tuple[Transfer, ...]:
        """What `rank` sends, by tensor and box: each of its peers receives in this order."""
        return self._transfers(np.flatnonzero(self.source == rank))

    def receives(self, rank: int) -> tuple[Transfer, ...]:
        """What `rank` receives, by tensor and box: each of its peers sends in this order."""
        return self._transfers(np.flatnonzero(self.rows.destination == rank))

    def _transfers(self, rows: IntArray) -> tuple[Transfer, ...]:
        """These rows as transfers: by tensor, box, destination and source."""
        many = (self.rows.last - self.rows.first)[rows]
        tensor = self.atoms.members[positions_of(self.rows.first[rows], many)]
        row = np.repeat(rows, many)
        low, destination = self.rows.low[row], self.rows.destination[row]
        order = np.lexsort([self.source[row], destination, *low.T[::-1], tensor])
        return tuple(
            Transfer(
                self.space.tensors[t].name, box_of(self.space, t, self.rows.low[r], self.rows.high[r]), source, target
            )
            for t, r, source, target in zip(
                tensor[order].tolist(),
                row[order].tolist(),
                self.source[row][order].tolist(),
                destination[order].tolist(),
                strict=True,
            )
        )

    def kept(self, rank: int) -> list[tuple[Piece, Piece, Box]]:
        """What `rank` copies within itself: (piece before, piece after, common box), where the pieces differ."""
        mine = self.before.on(rank)
        unchanged = set(mine)
        copies = []
        by_name: dict[str, list[Piece]] = {}
        for piece in mine:
            by_name.setdefault(piece.name, []).append(piece)
        for wanted in self.after.on(rank):
            if wanted in unchanged:
                continue
            for piece in by_name.get(wanted.name, ()):
                common = piece.box.intersect(wanted.box)
                if common is not None:
                    copies.append((piece, wanted, common))
        return copies

    def digest(self) -> int:
        """62 bits that differ where spaces, layouts or transfers do: ranks compare them before they move anything."""
        found = hashlib.blake2b(repr(self.space.tensors).encode(), digest_size=8)
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
        ):
            found.update(np.ascontiguousarray(part).tobytes())
        return int.from_bytes(found.digest(), "little") >> 2


def route(before: Layout, after: Layout, *, nodes: Sequence[int] | None = None) -> Route:
    """The transfers that turn `before` into `after`.

    `nodes` [P] says which node a rank is on (default: all on one). A missing piece comes from the same node if it can.
    Of several ranks that could send it, it comes from those that have least to send, in parts where that helps. Raises
    `LayoutError` if a piece that `after` wants lives nowhere.
    """
    if before.space != after.space or before.ranks != after.ranks:
        raise LayoutError(
            f"both layouts must be of one space and one number of ranks, got {before.ranks} and {after.ranks} ranks"
        )
    if nodes is not None and len(nodes) != before.ranks:
        raise SpecError(f"nodes needs one entry per rank ({before.ranks}), got {len(nodes)}")
    node = np.zeros(before.ranks, np.int64) if nodes is None else np.asarray(nodes, dtype=np.int64)
    atoms = cut(before.table, after.table)
    sizes = before.space.item_bytes
    rows, source = choose(missing_rows(atoms, node, sizes), before.ranks, atoms.members, sizes)
    return Route(before, after, node, atoms, rows, source)
