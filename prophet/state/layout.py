"""A layout says which box of which tensor lives on which rank.

Shape legend: P ranks. Any combination of pipeline, tensor, data, expert and ZeRO sharding is a layout: replicas are
equal boxes on several ranks, a shard is a part of a tensor's box. The constructors here cover slices along a
dimension and ranges of a flattened buffer; they combine by adding pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np

from prophet.errors import LayoutError
from prophet.spec import IntArray
from prophet.state.space import Box, Space
from prophet.state.table import Table, starts, table_from, table_of


class Piece(NamedTuple):
    """One box of one tensor."""

    name: str
    box: Box

    def __str__(self) -> str:
        return f"{self.name}{self.box}"


class Layout:
    """Pieces by rank, checked when built: boxes lie within their tensor, and those of a rank do not overlap.

    A layout of thousands of ranks is built from a `Table`; its pieces are made when they are asked for.

    Attributes:
        space: The tensors.
        ranks: Number of ranks, P.
        pieces: Pieces of every rank, [P][...].
    """

    _made: dict[int, tuple[Piece, ...]]

    def __init__(self, space: Space, pieces: Sequence[Sequence[tuple[str, Box]]]) -> None:
        rows = tuple(tuple(Piece(*p) for p in row) for row in pieces)
        if not rows:
            raise LayoutError("a layout needs at least one rank")
        self.space = space
        self.ranks = len(rows)
        self.pieces = rows
        self._made = {}
        for rank, row in enumerate(rows):
            # By tensor, since every box is compared with every other one
            by_name: dict[str, list[Box]] = {}
            for piece in row:
                if not space[piece.name].box.contains(piece.box):
                    raise LayoutError(f"{piece} of rank {rank} lies outside {list(space[piece.name].shape)}")
                by_name.setdefault(piece.name, []).append(piece.box)
            for name, boxes in by_name.items():
                for a, b in combinations(boxes, 2):
                    if a.intersect(b) is not None:
                        raise LayoutError(f"rank {rank} holds {name}{a} and {name}{b}, which overlap")

    @classmethod
    def of(cls, table: Table) -> Layout:
        """Wrap a table as a layout.

        That no rank's boxes overlap is up to whoever made the table: the check would take as long as making all pieces.
        """
        layout = cls.__new__(cls)
        layout.space, layout.ranks = table.space, table.ranks
        # Fills the cached property, so that no pieces are made to find the table
        layout.__dict__["table"] = table
        layout._made = {}
        return layout

    @cached_property
    def table(self) -> Table:
        """The layout as arrays."""
        return table_from(self.space, self.pieces)

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """Pieces of every rank."""
        return tuple(self.on(rank) for rank in range(self.ranks))

    def on(self, rank: int) -> tuple[Piece, ...]:
        """Pieces of one rank, in the order in which they were given."""
        # Pieces that exist already are used; to make those of all ranks for one of them would be slow
        return self.pieces[rank] if "pieces" in self.__dict__ else self.listed(rank)

    def listed(self, rank: int) -> tuple[Piece, ...]:
        """Pieces of one rank in the order of the table, in which each box stands once."""
        if rank not in self._made:
            table, names = self.table, self.space.tensors
            made = (Piece(names[int(table.tensor[k])].name, table.box(int(k))) for k in table.on(rank))
            self._made[rank] = tuple(made)
        return self._made[rank]

    def names_on(self, rank: int) -> set[str]:
        """Names of the tensors of which one rank has a piece."""
        if "pieces" in self.__dict__:
            return {piece.name for piece in self.pieces[rank]}
        names = self.space.tensors
        return {names[t].name for t in self.table.tensor[self.table.on(rank)].tolist()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.space == other.space and self.pieces == other.pieces

    def by_tensor(self) -> dict[str, list[tuple[int, Box]]]:
        """(rank, box) pairs of every tensor, by ascending rank."""
        found: dict[str, list[tuple[int, Box]]] = {t.name: [] for t in self.space.tensors}
        for rank, row in enumerate(self.pieces):
            for piece in row:
                found[piece.name].append((rank, piece.box))
        return found

    def check_complete(self) -> None:
        """Raise `LayoutError` unless every element of the space lives on some rank."""
        for name, held in self.by_tensor().items():
            left = missing([self.space[name].box], (box for _, box in held))
            if left:
                raise LayoutError(f"no rank holds {name}{left[0]}")


def missing(wanted: Iterable[Box], held: Iterable[Box]) -> list[Box]:
    """Disjoint boxes of what is in `wanted` and in none of `held`; boxes of `wanted` must be disjoint too."""
    left = [box for box in wanted if box.elements]
    for have in held:
        left = [rest for box in left for rest in box.subtract(have)]
    return left


def layout_from(space: Space, ranks: int, pieces: Mapping[int, Iterable[tuple[str, Box]]]) -> Layout:
    """Build a layout from the pieces of some ranks; the other ranks hold nothing.

    Args:
        space: The tensors.
        ranks: Number of ranks.
        pieces: Name and box of every piece, by rank.

    Raises:
        LayoutError: A rank is outside 0 .. `ranks` - 1, or the pieces make no valid layout.
    """
    stray = sorted(r for r in pieces if not 0 <= r < ranks)
    if stray:
        raise LayoutError(f"pieces are given for ranks {stray}, outside 0..{ranks - 1}")
    return Layout(space, tuple(tuple(Piece(*p) for p in pieces.get(r, ())) for r in range(ranks)))


def whole_tensors(space: Space, ranks: int, holders: Sequence[Sequence[int]]) -> Layout:
    """Build the layout in which every tensor is whole on each of its holders; fast for many tensors.

    Args:
        space: The tensors.
        ranks: Number of ranks.
        holders: Ranks that hold each tensor, in the order of the space, [tensors][...].

    Raises:
        LayoutError: A holder is outside 0 .. `ranks` - 1.
    """
    tensors = np.arange(len(space.tensors))
    holder = np.array([rank for row in holders for rank in row], dtype=np.int64)
    start = starts(np.array([len(row) for row in holders], dtype=np.int64))
    return Layout.of(table_of(space, ranks, tensors, np.zeros_like(space.shapes), space.shapes, start, holder))


def slice_box(shape: Sequence[int], dim: int, parts: int, index: int) -> Box:
    """The box of one part of a tensor that is cut along a dimension, as tensor parallelism does.

    Args:
        shape: Lengths of the tensor.
        dim: Dimension along which it is cut.
        parts: Number of parts; the first (length mod parts) of them are one longer.
        index: Which part, from 0.

    Raises:
        LayoutError: There is no such dimension or part.
    """
    if not (0 <= dim < len(shape) and 0 <= index < parts):
        raise LayoutError(f"no part {index} of {parts} along dimension {dim} of {list(shape)}")
    # `torch.tensor_split` cuts alike
    size, more = divmod(shape[dim], parts)
    first = index * size + min(index, more)
    whole = Box.whole(shape)
    stop = first + size + (1 if index < more else 0)
    return Box((*whole.start[:dim], first, *whole.start[dim + 1 :]), (*whole.stop[:dim], stop, *whole.stop[dim + 1 :]))


def zero_owners(elements: Sequence[int] | IntArray, members: int) -> IntArray:
    """Which of `members` ranks keeps the optimizer state of every parameter: runs of about equal size, in order."""
    size = np.asarray(elements, dtype=np.int64)
    # A tensor goes where its middle element falls. Twice as many members then split every run in two, and half of the
    # state stays in place.
    middle = np.cumsum(size) - size / 2
    return np.minimum((middle * members / max(int(size.sum()), 1)).astype(np.int64), members - 1)
