"""Replicas as policies make them: holders under construction, and how many copies every expert gets.

Shape legend: R ranks, E experts.

Several policies were made for inference or choose homes freely. In training an expert's home keeps its optimizer state,
so here the home's copy is pinned and only the further copies follow the policy. All respect the context's slot limits:
a rank whose slots are taken is passed over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prophet.spec import BoolArray, IntArray, Placement, PlanContext


@dataclass(frozen=True, eq=False, slots=True)
class Copies:
    """Holders under construction, with the slots that are left; the arrays are changed in place."""

    home: IntArray
    holds: BoolArray
    free: IntArray

    @classmethod
    def of(cls, context: PlanContext) -> Copies:
        """Every expert at home only."""
        home = np.asarray(context.home, dtype=np.int64)
        holds = np.zeros((context.experts, context.ranks), dtype=np.bool_)
        holds[np.arange(context.experts), home] = True
        return cls(home, holds, context.slot_limits())

    def copy_to(self, expert: int, ranks: IntArray) -> None:
        """Put a replica of `expert` on those of `ranks` that lack it and have a slot."""
        target = ranks[(self.free[ranks] > 0) & ~self.holds[expert, ranks]]
        self.holds[expert, target] = True
        self.free[target] -= 1

    def placement(self) -> Placement:
        """What has been copied so far, as a value."""
        return Placement(self.home, self.holds)


def pack(copies: IntArray, total: IntArray, context: PlanContext, by_node: bool = False) -> Placement:
    """Place `copies` [E] replicas per expert: heaviest share first, each on the least loaded rank with a slot.

    `by_node` prefers the node that holds fewest copies of the expert.
    """
    state = Copies.of(context)
    node = context.topology.node_ids()
    share = total / (copies + 1)
    load = np.bincount(state.home, weights=share, minlength=context.ranks)
    for e in np.argsort(-share, kind="stable"):
        for _ in range(int(copies[e])):
            allowed = (state.free > 0) & ~state.holds[e]
            if not allowed.any():
                break
            if by_node:
                cover = np.bincount(node[state.holds[e]], minlength=context.topology.nodes)[node]
                allowed &= cover == cover[allowed].min()
            target = int(np.flatnonzero(allowed)[load[allowed].argmin()])
            load[target] += share[e]
            state.copy_to(int(e), np.array([target]))
    return state.placement()


def heap_copies(total: IntArray, slots: int, most: int) -> IntArray:
    """Give `slots` replicas one by one to the expert with the most load per copy, at most `most` each, [E]."""
    copies = np.zeros(total.size, dtype=np.int64)
    for _ in range(slots):
        per_copy = np.where(copies < most, total / (copies + 1), -1.0)
        best = int(per_copy.argmax())
        if per_copy[best] <= 0:
            break
        copies[best] += 1
    return copies


def slots_of(context: PlanContext, per_rank: int) -> int:
    return int(np.minimum(context.slot_limits(), per_rank).sum())
