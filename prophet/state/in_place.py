"""Memory where old and new state replace each other: in which order tensors go, and what that takes.

Shape legend: P ranks, T tensors, C classes of tensors that take the same bytes on every rank. A new piece must be there
whole before its first byte comes, and an old one until its last reader has read it. So the order of tensors decides the
peak: in the model's order it can be as high as with both states whole, in another one no more than the larger of them.
What a rank holds in the same box before and after is handed over: it takes no memory twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from prophet.spec import IntArray
from prophet.state.layout import Layout, Piece
from prophet.state.table import numbered, starts

if TYPE_CHECKING:
    from torch import Tensor

# Fullness is counted in so many levels. Its fourth power, summed over thousands of ranks, still fits 64 bits
_LEVELS = 1024


def changes(before: Layout, after: Layout) -> tuple[tuple[IntArray, ...], tuple[IntArray, ...]]:
    """(tensor, rank, bytes) of boxes that a rank gives up, and of those that it gets."""
    a, b, ranks = before.table, after.table, before.ranks
    tensor = np.concatenate([a.tensor, b.tensor])
    low, high = np.concatenate([a.low, b.low]), np.concatenate([a.high, b.high])
    number, _ = numbered(tensor, *low.T, *high.T)
    entry_a = np.repeat(np.arange(len(a.tensor)), np.diff(a.start))
    entry_b = np.repeat(np.arange(len(b.tensor)), np.diff(b.start))
    # A number for each pair of box and rank: what a rank has under both layouts is handed over and takes no memory
    key_a = number[: len(a.tensor)][entry_a] * ranks + a.holder
    key_b = number[len(a.tensor) :][entry_b] * ranks + b.holder
    gone, come = ~np.isin(key_a, key_b), ~np.isin(key_b, key_a)
    sizes = before.space.item_bytes
    freed = (a.tensor[entry_a[gone]], a.holder[gone], (a.volume * sizes[a.tensor])[entry_a[gone]])
    taken = (b.tensor[entry_b[come]], b.holder[come], (b.volume * sizes[b.tensor])[entry_b[come]])
    return freed, taken


def in_place(before: Layout, after: Layout) -> tuple[IntArray, IntArray]:
    """Put tensors in an order in which old and new state fit into little memory.

    Each time, the tensor is next that raises the fullest rank's peak least. Among equals it is the one that leaves
    ranks least full, where fuller ranks count for more, then the one that frees most. Neighbours go together, in one
    wave, where that raises no rank's peak.

    Returns:
        The wave in which each tensor goes, [T], and the most bytes that each rank has at any time, without buffers,
        [P].
    """
    freed, taken = changes(before, after)
    tensors, ranks = len(before.space.tensors), before.ranks
    old = _by_tensor(freed, tensors, ranks)
    new = _by_tensor(taken, tensors, ranks)
    # A layer's tensors take and free the same bytes as the next layer's, so the search is over far fewer classes
    klass, first, members = _alike(old, new)
    old, new = old[first], new[first]
    left = np.diff(starts(np.bincount(klass, minlength=len(first))))
    at = starts(left)[:-1].copy()
    begin = before.table.rank_bytes()
    limit = np.maximum(np.maximum(begin, after.table.rank_bytes()), 1)
    now, peak, order = begin.copy(), begin.copy(), np.zeros(tensors, np.int64)

    def full(n_bytes: IntArray) -> IntArray:
        """Share of the larger state, in whole levels, so that all ranks find the same order."""
        return n_bytes * _LEVELS // limit

    for k in range(tensors):
        there = np.flatnonzero(left)
        # New pieces must be there before old ones go, so the peak is before the change
        most = np.maximum(full(now + new[there]).max(1), full(peak).max())
        change = new[there] - old[there]
        after_it = (full(now + change) ** 4).sum(1)
        # The last key of `lexsort` counts first. The class's number is the first key, so every tie ends alike on
        # all ranks
        pick = int(there[np.lexsort([there, change.sum(1), after_it, most])[0]])
        order[k] = members[at[pick]]
        at[pick] += 1
        left[pick] -= 1
        peak = np.maximum(peak, now + new[pick])
        now = now + new[pick] - old[pick]
    return _waves(order, klass, old, new, begin, peak), peak


def _waves(order: IntArray, klass: IntArray, old: IntArray, new: IntArray, begin: IntArray, peak: IntArray) -> IntArray:
    """Neighbours in `order` put together as far as every rank stays within its `peak`: the wave of each tensor, [T]."""
    wave = np.zeros(len(order), np.int64)
    number, room, freed = 0, peak - begin, np.zeros_like(begin)
    for tensor in order.tolist():
        k = klass[tensor]
        if (new[k] > room).any():
            # What this wave's tensors free is there for the next wave, and not before: readers are still at it
            number, room, freed = number + 1, room + freed, np.zeros_like(begin)
        wave[tensor] = number
        room, freed = room - new[k], freed + old[k]
    return wave


def _by_tensor(rows: tuple[IntArray, ...], tensors: int, ranks: int) -> IntArray:
    tensor, rank, n_bytes = rows
    found = np.bincount(tensor * ranks + rank, n_bytes, tensors * ranks)
    return found.astype(np.int64).reshape(tensors, ranks)


def _alike(old: IntArray, new: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Classes of tensors with equal rows: the class of each, the first of each class, tensors by class."""
    rows = np.ascontiguousarray(np.concatenate([old, new], axis=1))
    # Rows as single values: sorting them is much faster than comparing column by column
    whole = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1])))
    _, first, klass = np.unique(whole, return_index=True, return_inverse=True)
    klass = klass.reshape(-1)
    return klass, first, np.argsort(klass, kind="stable")


@dataclass
class Replacing:
    """One rank's memory in a transition in place: what each wave takes and gives back, and the peak.

    An old tensor's memory is its storage's, of which it may be a view: it goes back once all of the storage that is
    state has been read. A storage that also holds something else, or that torch cannot resize, stays.

    Attributes:
        old_bytes: Bytes of the old state's storages.
        takes: New pieces of every wave.
        gives: A tensor of every storage that goes back after the wave, by wave.
        begins: Called with a wave's new pieces once the wave before has given its memory back.
        sizes: Bytes of an element, by tensor.
        waves_begun: How many waves have begun.
    """

    old_bytes: int
    takes: list[list[Piece]]
    gives: list[list[Tensor]]
    begins: Callable[[list[Piece]], None]
    sizes: Mapping[str, int]
    waves_begun: int = field(default=0, init=False)

    @classmethod
    def of(
        cls,
        state: Mapping[Piece, Tensor],
        after: tuple[Piece, ...],
        wave_of: Mapping[str, int],
        waves: int,
        sizes: Mapping[str, int],
        begins: Callable[[list[Piece]], None],
        beside: Sequence[Tensor] = (),
        *,
        in_place: bool,
    ) -> Replacing:
        """Find what each wave takes and gives back.

        Args:
            state: This rank's tensors under the old layout.
            after: Its pieces under the new one.
            wave_of: Wave of every tensor.
            waves: Number of waves.
            sizes: Bytes of an element, by tensor.
            begins: Called with a wave's new pieces once the wave before has given its memory back.
            beside: Tensors that are given up with the state, and take memory till then. A storage of these alone stays.
            in_place: Whether storages go back; one does where `state` and `beside` are all of it.
        """
        wanted = set(after)
        takes: list[list[Piece]] = [[] for _ in range(waves)]
        for piece in after:
            if piece not in state:
                takes[wave_of[piece.name]].append(piece)
        views_of: dict[int, list[Tensor]] = {}
        for tensor in (*state.values(), *beside):
            views_of.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        old_bytes = sum(views[0].untyped_storage().nbytes() for views in views_of.values())
        gives: list[list[Tensor]] = [[] for _ in range(waves)]
        pieces_in: dict[int, list[Piece]] = {}
        for piece, tensor in state.items() if in_place else ():
            pieces_in.setdefault(tensor.untyped_storage()._cdata, []).append(piece)
        for key, pieces in pieces_in.items():
            views, storage = views_of[key], views_of[key][0].untyped_storage()
            # What else is in the storage belongs to somebody, who may still read it
            whole = _covered(views) >= storage.nbytes() and storage.resizable()
            if whole and wanted.isdisjoint(pieces):
                # A storage goes with the last of its tensors
                gives[max(wave_of[p.name] for p in pieces)].append(views[0])
        return cls(old_bytes, takes, gives, begins, sizes)

    def piece_bytes(self, piece: Piece) -> int:
        """Bytes of one piece."""
        return piece.box.elements * self.sizes[piece.name]

    @property
    def new_bytes(self) -> int:
        """Bytes of all that is new."""
        return sum(self.piece_bytes(piece) for row in self.takes for piece in row)

    @property
    def given_bytes(self) -> int:
        """Bytes of all that goes back."""
        return sum(t.untyped_storage().nbytes() for row in self.gives for t in row)

    def peak_bytes(self) -> int:
        """The most bytes of state at any time, exactly; call it before the first wave has begun."""
        now = most = self.old_bytes
        for taken, given in zip(self.takes, self.gives, strict=True):
            now += sum(map(self.piece_bytes, taken))
            most = max(most, now)
            now -= sum(t.untyped_storage().nbytes() for t in given)
        return most

    def up_to(self, wave: int) -> None:
        """Begin all waves up to this one; each of them first gives back what the one before has read."""
        while self.waves_begun <= wave:
            self._give_back(self.waves_begun - 1)
            self.begins(self.takes[self.waves_begun])
            self.waves_begun += 1

    def end(self) -> None:
        """Begin what has not begun, and give the last back."""
        self.up_to(len(self.takes) - 1)
        self._give_back(len(self.takes) - 1)

    def _give_back(self, wave: int) -> None:
        # Other tensors may still refer to the storage. Only a storage of size 0 gives its memory back whoever holds it
        for tensor in self.gives[wave] if wave >= 0 else ():
            tensor.untyped_storage().resize_(0)


def _covered(views: Iterable[Tensor]) -> int:
    """Bytes of a storage that its `views` have, each counted once; a view with gaps counts for nothing."""
    found = end = 0
    for t in sorted(views, key=lambda t: t.storage_offset() * t.element_size()):
        # A view of as many elements as it spans has no gaps, in whatever order of dimensions
        extent = 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
        first = int(t.storage_offset()) * t.element_size()
        last = first + t.numel() * t.element_size()
        if extent == t.numel() and last > end:
            found, end = found + last - max(first, end), last
    return found
