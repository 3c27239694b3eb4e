"""Least-loaded expert parallelism (LLEP)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prophet.planner.base import Planner
from prophet.planner.policies.copies import Copies
from prophet.planner.policies.splits import fill
from prophet.spec import IntArray, Placement, PlanContext, Split, check_load


@dataclass(frozen=True, kw_only=True, slots=True)
class LlepPlanner(Planner):
    """Least-loaded EP: above a threshold, homes keep up to a cap and the rest spills in chunks.

    Attributes:
        alpha: The cap of a home, in multiples of the mean load of ranks.
        threshold: Largest over mean load of ranks, below which nothing spills.
        chunk: Tokens that a spill has at least.
    """

    alpha: float = 1.0
    threshold: float = 1.3
    chunk: int = 64
    name: str = "llep"

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        load = check_load(load)
        state = Copies.of(context)
        everywhere = np.ones((context.experts, context.ranks), dtype=np.bool_)
        amounts = self._amounts(load, state.home, everywhere, state.free)
        for e, r in np.argwhere(amounts > 0):
            state.copy_to(int(e), np.array([r]))
        return state.placement()

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        load = check_load(load)
        # The placement is fixed by now: `allowed` limits the holders, not slots
        slots = np.full(context.ranks, context.experts, dtype=np.int64)
        amounts = self._amounts(load, placement.home, placement.holds, slots)
        return fill(load, amounts, placement, context.topology.node_ids())

    def _amounts(
        self, load: IntArray, home: IntArray, allowed: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], free: IntArray
    ) -> IntArray:
        """Divide every expert's tokens over ranks.

        Args:
            load: Tokens [R, E].
            home: Homes [E].
            allowed: Whether [E, R] a rank may hold an expert.
            free: Slots [R] that are left.

        Returns:
            Tokens [E, R] of each expert on each rank.
        """
        experts, ranks = home.size, load.shape[0]
        total = load.sum(axis=0)
        amounts = np.zeros((experts, ranks), dtype=np.int64)
        at_home = np.bincount(home, weights=total, minlength=ranks).astype(np.int64)
        amounts[np.arange(experts), home] = total
        if at_home.max() * ranks < self.threshold * max(1, int(total.sum())):
            return amounts
        cap = int(np.ceil(self.alpha * total.sum() / ranks))
        free = free.copy()
        # Tokens that ranks compute so far
        taken = np.zeros(ranks, dtype=np.int64)
        # Tokens of the homes' experts that are still to be divided
        pending = at_home.copy()
        for e in np.argsort(-total, kind="stable"):
            h = home[e]
            pending[h] -= total[e]
            keep = int(np.clip(cap - taken[h] - pending[h], 0, total[e]))
            rest = int(total[e]) - keep
            amounts[e] = 0
            amounts[e, h] = keep
            while rest > 0:
                open_ranks = allowed[e] & ((free > 0) | (amounts[e] > 0))
                open_ranks[h] = False
                room = np.where(open_ranks, cap - taken - pending, -1)
                target = int(room.argmax())
                part = min(rest, max(int(room[target]), self.chunk))
                # Nobody has room: the rest stays at home
                if room[target] <= 0:
                    target, part = int(h), rest
                elif amounts[e, target] == 0:
                    free[target] -= 1
                amounts[e, target] += part
                taken[target] += part if target != h else 0
                rest -= part
            taken[h] += amounts[e, h]
        return amounts
