"""UltraEP, and MoonEP as a variant of it: exports from overloaded ranks up to a level."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prophet.planner.base import Planner
from prophet.planner.policies.copies import Copies
from prophet.planner.split.exact import exact_split
from prophet.spec import IntArray, Placement, PlanContext, Split, check_load


@dataclass(frozen=True, kw_only=True, slots=True)
class UltraEpPlanner(Planner):
    """UltraEP: bisect a load threshold (to 1 %); overloaded ranks export their heaviest experts where there is slack.

    `exact_match`: MoonEP's variant, in which the most overloaded home meets the roomiest rank until loads are even.
    """

    exact_match: bool = False
    name: str = "ultraep"

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        total = check_load(load).sum(axis=0)
        even = float(total.sum()) / context.ranks
        done, placement = self._export(total, even, context)
        if self.exact_match or done or even == 0:
            return placement
        # Between the even load, which has just failed, and that of homes alone, which needs no exports
        low = even
        high = float(np.bincount(np.asarray(context.home), weights=total, minlength=context.ranks).max())
        placement = context.homes_only()
        while high - low > 0.01 * even:
            middle = (low + high) / 2
            done, candidate = self._export(total, middle, context)
            if done:
                high, placement = middle, candidate
            else:
                low = middle
        return placement

    def _export(self, total: IntArray, level: float, context: PlanContext) -> tuple[bool, Placement]:
        """Export tokens until all loads are at `level`; whether all excess was placed, and the placement."""
        state = Copies.of(context)
        slack = level - np.bincount(state.home, weights=total, minlength=context.ranks)
        left = total.astype(np.float64)
        stuck = np.zeros(context.ranks, dtype=np.bool_)
        while True:
            excess = np.where(stuck, 0.0, -slack)
            giver = int(excess.argmax())
            if excess[giver] < 1.0:
                return bool((slack > -1.0).all()), state.placement()
            mine = np.flatnonzero(state.home == giver)
            e = int(mine[left[mine].argmax()])
            open_ranks = (state.free > 0) & (slack > 0) & ~state.holds[e]
            # This rank cannot get rid of more; the others still may
            if left[e] <= 0 or not open_ranks.any():
                stuck[giver] = True
                continue
            target = int(np.where(open_ranks, slack, -1.0).argmax())
            part = min(excess[giver], slack[target], left[e])
            left[e] -= part
            slack[giver] += part
            slack[target] -= part
            state.copy_to(e, np.array([target]))

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        return exact_split(load, placement, context.topology)
