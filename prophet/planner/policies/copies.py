"""Building blocks of policies: holders under construction, and how many copies every expert gets.

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
    """Holders under construction; the arrays are changed in place.

    Attributes:
        home: Homes [E].
        holds: Whether [E, R] a rank holds an expert, as home or replica.
        free: Slots [R] that are left.
    """

    home: IntArray
    holds: BoolArray
    free: IntArray

    @classmethod
    def of(cls, context: PlanContext) -> Copies:
        """Start with every expert at home only."""
        home = np.asarray(context.home, dtype=np.int64)
        holds = np.zeros((context.experts, context.ranks), dtype=np.bool_)
        holds[np.arange(context.experts), home] = True
        return cls(home, holds, context.slot_limits())

    def copy_to(self, expert: int, ranks: IntArray) -> None:
        """Put a replica of `expert` on those of `ranks` that lack it and have a slot."""
        # Ranks without a slot are passed over: policies were made without such limits
        target = ranks[(self.free[ranks] > 0) & ~self.holds[expert, ranks]]
        self.holds[expert, target] = True
        self.free[target] -= 1

    def placement(self) -> Placement:
        """Return the holders so far as a value."""
        return Placement(self.home, self.holds)


def pack(copies: IntArray, total: IntArray, context: PlanContext, by_node: bool = False) -> Placement:
    """Place replicas greedily: heaviest share first, each on the least loaded rank with a slot.

    Args:
        copies: Replicas [E] per expert.
        total: Tokens [E] per expert.
        context: Homes and limits.
        by_node: Whether to prefer the node that holds fewest copies of the expert.
    """
    state = Copies.of(context)
    node = context.topology.node_ids()
    # The home's copy takes a share as well
    share = total / (copies + 1)
    load = np.bincount(state.home, weights=share, minlength=context.ranks)
    for e in np.argsort(-share, kind="stable"):
        for _ in range(int(copies[e])):
            allowed = (state.free > 0) & ~state.holds[e]
            # The policy wants more copies than there is room for: the heavier experts have theirs
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
    """Give replicas one by one to the expert with the most load per copy.

    Args:
        total: Tokens [E] per expert.
        slots: Replicas to give away.
        most: Replicas that an expert may get.

    Returns:
        Replicas [E] per expert.
    """
    copies = np.zeros(total.size, dtype=np.int64)
    for _ in range(slots):
        per_copy = np.where(copies < most, total / (copies + 1), -1.0)
        best = int(per_copy.argmax())
        # All that have tokens are full: further copies would serve nobody
        if per_copy[best] <= 0:
            break
        copies[best] += 1
    return copies


def slots_of(context: PlanContext, per_rank: int) -> int:
    """Count the slots of all ranks, at most `per_rank` on each."""
    return int(np.minimum(context.slot_limits(), per_rank).sum())
