"""Memory of a switch, exactly and beforehand: while old and new state are whole, and while they replace each other.

Shape legend: P ranks, T tensors, C classes of tensors that take the same bytes on every rank. What a rank holds in the
same boxes before and after is handed over: it takes no memory twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prophet.spec import IntArray
from prophet.state.layout import Layout
from prophet.state.table import numbered, starts


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of training state per rank, [P]: before, after, and what both share."""

    before: IntArray
    after: IntArray
    shared: IntArray

    @property
    def safe_peak(self) -> IntArray:
        """Bytes of each rank while old and new state are whole, without buffers: [P]."""
        return self.before + self.after - self.shared

    @property
    def larger(self) -> IntArray:
        """The larger of old and new state of each rank: what no way of switching can go below. [P]"""
        return np.maximum(self.before, self.after)


def memory_of(before: Layout, after: Layout) -> Memory:
    """What ranks hold in both layouts."""
    _, taken = _changes(before, after)
    old, new = before.table.rank_bytes(), after.table.rank_bytes()
    changed = np.bincount(taken[1], taken[2], before.ranks).astype(np.int64)
    return Memory(before=old, after=new, shared=new - changed)


def _changes(before: Layout, after: Layout) -> tuple[tuple[IntArray, ...], tuple[IntArray, ...]]:
    """(tensor, rank, bytes) of boxes that a rank gives up, and of those that it gets."""
    a, b, ranks = before.table, after.table, before.ranks
    tensor = np.concatenate([a.tensor, b.tensor])
    low, high = np.concatenate([a.low, b.low]), np.concatenate([a.high, b.high])
    number, _ = numbered(tensor, *low.T, *high.T)
    entry_a = np.repeat(np.arange(len(a.tensor)), np.diff(a.start))
    entry_b = np.repeat(np.arange(len(b.tensor)), np.diff(b.start))
    key_a = number[: len(a.tensor)][entry_a] * ranks + a.holder
    key_b = number[len(a.tensor) :][entry_b] * ranks + b.holder
    gone, come = ~np.isin(key_a, key_b), ~np.isin(key_b, key_a)
    sizes = before.space.item_bytes
    freed = (a.tensor[entry_a[gone]], a.holder[gone], (a.volume * sizes[a.tensor])[entry_a[gone]])
    taken = (b.tensor[entry_b[come]], b.holder[come], (b.volume * sizes[b.tensor])[entry_b[come]])
    return freed, taken


def in_place(before: Layout, after: Layout) -> tuple[IntArray, IntArray]:
    """An order of tensors that keeps memory low where each old one goes once its new one is whole, and its peak.

    Returns the order [T] and the most bytes that each rank has at any time, without buffers: [P]. Each time, that
    tensor is next which leaves the fullest rank least full, and among equals the one that frees most.
    """
    freed, taken = _changes(before, after)
    tensors, ranks = len(before.space.tensors), before.ranks
    old = _by_tensor(freed, tensors, ranks)
    new = _by_tensor(taken, tensors, ranks)
    klass, first, members = _alike(old, new)
    old, new = old[first], new[first]
    left = np.diff(starts(np.bincount(klass, minlength=len(first))))
    at = starts(left)[:-1].copy()
    now = before.table.rank_bytes()
    limit = np.maximum(np.maximum(now, after.table.rank_bytes()), 1)
    peak, order = now.copy(), np.zeros(tensors, np.int64)
    for k in range(tensors):
        there = np.flatnonzero(left)
        full = np.maximum(((now + new[there]) / limit).max(1), (peak / limit).max())
        change = (new[there] - old[there]).sum(1)
        pick = int(there[np.lexsort([there, change, full])[0]])
        order[k] = members[at[pick]]
        at[pick] += 1
        left[pick] -= 1
        peak = np.maximum(peak, now + new[pick])
        now = now + new[pick] - old[pick]
    return order, peak


def _by_tensor(rows: tuple[IntArray, ...], tensors: int, ranks: int) -> IntArray:
    tensor, rank, n_bytes = rows
    found = np.bincount(tensor * ranks + rank, n_bytes, tensors * ranks)
    return found.astype(np.int64).reshape(tensors, ranks)


def _alike(old: IntArray, new: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Classes of tensors with equal rows: the class of each, the first of each class, tensors by class."""
    rows = np.ascontiguousarray(np.concatenate([old, new], axis=1))
    whole = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1])))
    _, first, klass = np.unique(whole, return_index=True, return_inverse=True)
    klass = klass.reshape(-1)
    return klass, first, np.argsort(klass, kind="stable")
