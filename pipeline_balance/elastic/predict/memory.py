"""Memory of a switch, exactly and beforehand. Where old and new state replace each other: `prophet.state.in_place`.

Shape legend: P ranks. What a rank holds in the same boxes before and after is handed over: it takes no memory twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prophet.spec import IntArray
from prophet.state.in_place import changes
from prophet.state.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of training state per rank [P].

    Attributes:
        before: In the old layout.
        after: In the new layout.
        shared: In the same boxes before and after.
    """

    before: IntArray
    after: IntArray
    shared: IntArray

    @property
    def safe_peak(self) -> IntArray:
        """Bytes of each rank while old and new state are whole, without buffers: [P]."""
        return self.before + self.after - self.shared

    @property
    def larger(self) -> IntArray:
        """The larger of old and new state of each rank [P], below which no switch can go."""
        return np.maximum(self.before, self.after)


def memory_of(before: Layout, after: Layout) -> Memory:
    """What ranks hold in both layouts."""
    # pieces that are the same box on the same rank keep their memory
    _, taken = changes(before, after)
    old, new = before.table.rank_bytes(), after.table.rank_bytes()
    changed = np.bincount(taken[1], taken[2], before.ranks).astype(np.int64)
    return Memory(before=old, after=new, shared=new - changed)
