"""Which rank takes which new place: the assignment that leaves the fewest bytes to move.

A tp group stays on one node: blocks of tp places go to blocks of tp ranks of a node, and the places of a block to its
ranks. Where tp is larger than a node, blocks are the largest that fit. DynaTran keeps the ranks' numbers; which number
has which place is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipeline_balance.elastic.layouts.boxes import ModelDescription, layout_of
from pipeline_balance.elastic.layouts.parallelism import FEWEST_BYTES, Parallelism
from prophet.errors import SpecError
from prophet.spec import FloatArray, IntArray
from prophet.state.atoms import Atoms, cut
from prophet.state.layout import Layout

LARGEST_EXACT = 2048
"""Blocks up to which the assignment is the best one; beyond, the largest overlaps are taken one after the other."""


def ordered(
    model: ModelDescription,
    before: Layout,
    after: Parallelism,
    *,
    nodes: Sequence[int] | None = None,
    flat: bool = False,
) -> Parallelism:
    """`after` with the order of ranks that leaves the fewest bytes to move from `before`, if it asks for that.

    Ranks of the world that get no place hold nothing afterwards. Of equal orders the one with the lowest ranks first
    is taken, so every rank finds the same.

    Args:
        model: What is laid out.
        before: The layout in force, over all ranks of the world [P].
        after: The layout to come; one with another order than "fewest-bytes" is returned as it is.
        nodes: The node of every rank [P]; None: all are on one.
        flat: As `layout_of` takes it.

    Raises:
        SpecError: Where `after` has more places than there are ranks.
    """
    if after.order != FEWEST_BYTES:
        return after
    if after.ranks > before.ranks:
        raise SpecError(f"{after} needs {after.ranks} ranks, the world has {before.ranks}")
    # overlaps are counted by place: place k stands for itself until it has a rank
    given = replace(after, order=None)
    atoms = cut(before.table, layout_of(model, given, ranks=before.ranks, flat=flat).table)
    node = np.zeros(before.ranks, np.int64) if nodes is None else np.asarray(nodes, dtype=np.int64)
    most = int(np.bincount(node).max())
    # the largest divisor of tp that a node has room for
    size = max(s for s in range(1, min(after.tp, most) + 1) if after.tp % s == 0)
    blocks = _blocks(node, size)
    row, column, inner = overlaps(atoms, before.space.item_bytes, blocks, after.ranks)
    chosen = _matched(row, column, _inner_values(inner), len(blocks), after.ranks // size)
    return replace(after, order=tuple(_inside(blocks, chosen, row, column, inner).ravel().tolist()))


def overlaps(
    atoms: Atoms, item_bytes: IntArray, blocks: IntArray, places: int
) -> tuple[IntArray, IntArray, FloatArray]:
    """Bytes that ranks hold of what places want, for the pairs of blocks that share any.

    Args:
        atoms: Both layouts cut into common parts.
        item_bytes: Bytes per element of every tensor.
        blocks: Ranks in blocks [n, size], as they may take blocks of places.
        places: How many places there are.

    Returns:
        The block of ranks and the block of places of every pair, and bytes [pairs, rank in block, place in block].
    """
    from scipy.sparse import coo_array, csr_array

    held, wanted, n_bytes = atoms.demand(item_bytes)
    start, values = atoms.lists.start, atoms.lists.values
    many, ranks, size = len(start) - 1, max(int(blocks.max()), int(values.max(initial=0))) + 1, blocks.shape[1]
    belongs = csr_array((np.ones(len(values)), values, start), shape=(many, ranks))
    # bytes by who holds and who wants them: there are far fewer lists of ranks than atoms
    by_lists = coo_array((n_bytes.astype(np.float64), (held, wanted)), shape=(many, many)).tocsr()
    holds, wants = belongs[:, blocks.ravel()], belongs[:, :places]
    # bytes [rank, place] = holds^T x bytes of lists x wants; blocks of zeros are never made
    found = (holds.T.tocsr() @ by_lists @ wants).tobsr(blocksize=(size, size))
    row = np.repeat(np.arange(len(blocks)), np.diff(found.indptr))
    return row, found.indices.astype(np.int64), found.data


def _blocks(node: IntArray, size: int) -> IntArray:
    """Ranks in blocks of `size`, those of a node first; what nodes have left over makes the last blocks. [n, size]"""
    # stable, so that ranks of a node stay in ascending order
    order = np.argsort(node, kind="stable")
    many = np.bincount(node)
    inside = np.arange(len(node)) - np.repeat(np.cumsum(many) - many, many)
    # ranks of a node that fill whole blocks come first; what is left over mixes nodes
    whole = inside < np.repeat(many // size * size, many)
    arranged = np.concatenate([order[whole], order[~whole]])
    return arranged[: len(arranged) // size * size].reshape(-1, size)


def _inside(blocks: IntArray, chosen: IntArray, row: IntArray, column: IntArray, inner: FloatArray) -> IntArray:
    """The rank of every place, [blocks of places, size], once every block of places has its block of ranks."""
    wanted = chosen * len(chosen) + np.arange(len(chosen))
    key = row * len(chosen) + column
    order = np.argsort(key, kind="stable")
    # a pair that shares no bytes is not listed; then any order within the block will do
    at = np.minimum(np.searchsorted(key[order], wanted), max(len(key) - 1, 0))
    found = blocks[chosen]
    for c in np.flatnonzero(key[order][at] == wanted).tolist() if len(key) else []:
        found[c] = found[c][_inner_order(inner[order[at[c]]])]
    return found


def _inner_values(inner: FloatArray) -> FloatArray:
    """The bytes [pairs] that a block of ranks keeps of a block of places: a lower bound that is cheap to compute.

    It is the larger of two: what the order as given keeps, and what picking the largest overlap time after time keeps.
    """
    straight = np.trace(inner, axis1=1, axis2=2)
    left, total = inner.copy(), np.zeros(len(inner))
    every = np.arange(len(inner))
    for _ in range(inner.shape[1]):
        best = left.reshape(len(left), -1).argmax(1)
        i, j = np.divmod(best, inner.shape[2])
        # rows and columns that are taken are at -1
        total += np.maximum(left[every, i, j], 0)
        left[every, i, :] = -1.0
        left[every, :, j] = -1.0
    found: FloatArray = np.maximum(straight, total)
    return found


def _inner_order(inner: FloatArray) -> IntArray:
    """The rank (by its number in the block) for every place of a block, from bytes [rank, place]."""
    from scipy.optimize import linear_sum_assignment

    # no other order can keep more: numbers stay as they are
    if np.trace(inner) >= inner.max(axis=0).sum():
        return np.arange(len(inner))
    found: IntArray = linear_sum_assignment(inner.T, maximize=True)[1]
    return found


def _matched(row: IntArray, column: IntArray, value: FloatArray, rows: int, columns: int) -> IntArray:
    """A row for every column, all different, with the largest sum of values. [columns]"""
    from scipy.optimize import linear_sum_assignment

    if rows <= LARGEST_EXACT:
        # linear_sum_assignment takes dense matrices alone
        dense = np.zeros((columns, rows))
        dense[column, row] = value
        # among equals, a block keeps its number
        dense[np.arange(columns), np.arange(columns)] += value.max(initial=1.0) * 1e-9
        found: IntArray = linear_sum_assignment(dense, maximize=True)[1]
        return found
    chosen, free = np.full(columns, -1), np.ones(rows, dtype=bool)
    # ties go to the lowest row: all ranks must find the same
    order = np.lexsort([column, row, -value])
    row, column = row[order], column[order]
    while len(row):
        # pairs that are the first of both their row and their column
        head_row, head_column = np.zeros(len(row), bool), np.zeros(len(row), bool)
        head_row[np.unique(row, return_index=True)[1]] = True
        head_column[np.unique(column, return_index=True)[1]] = True
        both = head_row & head_column
        chosen[column[both]] = row[both]
        free[row[both]] = False
        left = free[row] & (chosen[column] < 0)
        row, column = row[left], column[left]
    # places that overlap with nobody take the free rows in ascending order
    chosen[chosen < 0] = np.flatnonzero(free)[: int((chosen < 0).sum())]
    return chosen
