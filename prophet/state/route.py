"""Routes from one layout to another: the exact transfers, by box intersection.

Shape legend: P ranks. Rank i sends the union over j of held(i) with wanted(j) minus held(j), and every piece that j
misses has one owner. (DynaTran's printed send set, what i holds and no longer wants, sends nothing when a copy is
added.) So the bytes on the wire are the bytes that some rank misses, none twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prophet.errors import LayoutError, SpecError
from prophet.state.layout import Layout, Piece, missing
from prophet.state.space import Box, Space


@dataclass(frozen=True, slots=True)
class Transfer:
    """One box of one tensor goes from rank `source` to rank `destination`."""

    name: str
    box: Box
    source: int
    destination: int

    def __str__(self) -> str:
        return f"{self.name}{self.box} {self.source}->{self.destination}"


@dataclass(frozen=True)
class Route:
    """All transfers from layout `before` to layout `after`, in an order that every rank derives alike."""

    before: Layout
    after: Layout
    transfers: tuple[Transfer, ...]

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
        return sum(self.n_bytes(t) for t in self.transfers)

    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes every rank sends, [P]."""
        sent = [0] * self.ranks
        for t in self.transfers:
            sent[t.source] += self.n_bytes(t)
        return tuple(sent)

    def received_bytes(self) -> tuple[int, ...]:
        """Bytes every rank receives, [P]."""
        received = [0] * self.ranks
        for t in self.transfers:
            received[t.destination] += self.n_bytes(t)
        return tuple(received)

    def kept(self, rank: int) -> list[tuple[Piece, Piece, Box]]:
        """What `rank` copies within itself: (piece before, piece after, common box), where the pieces differ."""
        mine = self.before.pieces[rank]
        unchanged = set(mine)
        copies = []
        by_name: dict[str, list[Piece]] = {}
        for piece in mine:
            by_name.setdefault(piece.name, []).append(piece)
        for wanted in self.after.pieces[rank]:
            if wanted in unchanged:
                continue
            for piece in by_name.get(wanted.name, ()):
                common = piece.box.intersect(wanted.box)
                if common is not None:
                    copies.append((piece, wanted, common))
        return copies


def route(before: Layout, after: Layout, *, nodes: Sequence[int] | None = None) -> Route:
    """The transfers that turn `before` into `after`.

    `nodes` [P] says which node a rank is on (default: all on one). A missing piece comes from the same node if it can,
    then from the rank that has sent the least so far, then from the lowest rank. Raises `LayoutError` if a piece that
    `after` wants lives nowhere.
    """
    if before.space != after.space or before.ranks != after.ranks:
        raise LayoutError(
            f"both layouts must be of one space and one number of ranks, got {before.ranks} and {after.ranks} ranks"
        )
    if nodes is not None and len(nodes) != before.ranks:
        raise SpecError(f"nodes needs one entry per rank ({before.ranks}), got {len(nodes)}")
    node = list(nodes) if nodes is not None else [0] * before.ranks
    held = before.by_tensor()
    wanted = after.by_tensor()
    sent = [0] * before.ranks
    transfers: list[Transfer] = []
    for tensor in before.space.tensors:
        holders = held[tensor.name]
        for destination in dict.fromkeys(rank for rank, _ in wanted[tensor.name]):
            wants = [box for rank, box in wanted[tensor.name] if rank == destination]
            has = [box for rank, box in holders if rank == destination]
            left = missing(wants, has)
            while left:
                gap = left.pop()
                offers = [
                    (node[rank] != node[destination], sent[rank], rank, common)
                    for rank, box in holders
                    if (common := box.intersect(gap)) is not None
                ]
                if not offers:
                    raise LayoutError(f"rank {destination} is to get {tensor.name}{gap}, which no rank holds")
                _, _, source, common = min(offers)
                transfers.append(Transfer(tensor.name, common, source, destination))
                sent[source] += common.elements * tensor.item_bytes
                left += gap.subtract(common)
    return Route(before, after, tuple(transfers))
