"""Pro-Prophet: Algorithm 1 of "A Systematic Load Balancing Method for Efficient Parallel Training of Large-scale MoE
Models" (Wang et al.), over the performance model of its Eq. 1-8.

Shape legend: R ranks (D of the paper), E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from prophet.errors import SpecError
from prophet.planner.base import Planner
from prophet.planner.model.cost import paper_cost
from prophet.planner.policies.copies import Copies
from prophet.planner.policies.splits import local_split
from prophet.spec import BoolArray, IntArray, Placement, PlanContext, Split, StepCost, check_load


@dataclass(frozen=True, kw_only=True, slots=True)
class ProProphetPlanner(Planner):
    """Pro-Prophet's greedy search (Algorithm 1).

    Where the printed algorithm is unclear: with several experts per rank the heaviest rank gives its heaviest expert
    that was not taken yet; loads are computed before they are scored; the search ends when the load is balanced. The
    search interval is the engine's: `ReplanConfig`.

    Attributes:
        n: The number of ranks that do not get a replicated expert; None tries every n and keeps the best.
        alpha: The balance coefficient of Eq. 7.
        equation: Scores with Eq. 6, for blocking transfers, or Eq. 8, for block-wise ones.
        name: Its name in reports.
    """

    n: int | None = None
    alpha: float = 0.5
    equation: Literal[6, 8] = 8
    name: str = "pro-prophet"

    def __post_init__(self) -> None:
        if self.alpha < 0 or (self.n is not None and self.n < 0):
            raise SpecError(f"pro-prophet planner: n and alpha must not be negative, got {self.n}, {self.alpha}")
        if self.equation not in (6, 8):
            raise SpecError(f"pro-prophet planner: equation must be 6 or 8, got {self.equation}")

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        load = check_load(load)
        if load.shape != (context.ranks, context.experts):
            raise SpecError(f"load must be [{context.ranks}, {context.experts}], got {list(load.shape)}")
        # n counts ranks besides the home, so it is R - 1 at most
        choices = range(context.ranks) if self.n is None else (min(self.n, context.ranks - 1),)
        best: tuple[float, Placement] | None = None
        for n in choices:
            seconds, placement = self._search(load, n, context)
            if best is None or seconds < best[0]:
                best = (seconds, placement)
        return best[1] if best is not None else context.homes_only()

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        del context
        return local_split(load, placement)

    def _search(self, load: IntArray, n: int, context: PlanContext) -> tuple[float, Placement]:
        """Run Algorithm 1 for one n; the predicted seconds and the placement."""
        experts = load.shape[1]
        home = np.asarray(context.home, dtype=np.int64)
        total = load.sum(axis=0)
        state = Copies.of(context)
        computed, received = local_loads(load, state.holds, home)
        best_s = self._score(computed, received, 0, n, context).total_s
        best = state.holds.copy()
        # Eq. 7: balanced where the largest and the smallest load differ by less than this
        balanced = self.alpha * float(total.sum()) / experts
        taken = np.zeros(experts, dtype=np.bool_)
        replicated = 0
        while computed.max() - computed.min() >= balanced:
            candidates = np.flatnonzero((home == computed.argmax()) & ~taken)
            if candidates.size == 0:
                break
            expert = int(candidates[total[candidates].argmax()])
            taken[expert] = True
            # The n ranks with the fewest tokens for the expert do without it
            order = np.argsort(load[:, expert], kind="stable")
            order = order[order != home[expert]]
            state.copy_to(expert, order[min(n, order.size) :])
            replicated += 1
            computed, received = local_loads(load, state.holds, home)
            seconds = self._score(computed, received, replicated, n, context).total_s
            # The search goes on after a change for the worse: a later expert may make up for it
            if seconds < best_s:
                best_s = seconds
                best = state.holds.copy()
        return best_s, Placement(home, best)

    def _score(self, computed: IntArray, received: IntArray, replicated: int, n: int, context: PlanContext) -> StepCost:
        return paper_cost(
            computed,
            received,
            replicated=replicated,
            excluded=n,
            context=context,
            overlapped=self.equation == 8,
        )


def local_loads(load: IntArray, holds: BoolArray, home: IntArray) -> tuple[IntArray, IntArray]:
    """Return H and R of the paper, both [R], when tokens stay where their expert is held and go home elsewhere.

    Args:
        load: Tokens [R, E].
        holds: Whether [E, R] a rank holds an expert.
        home: Homes [E].

    Returns:
        Tokens that each rank computes, and tokens that it receives.
    """
    ranks = load.shape[0]
    local = holds.T
    stays = np.where(local, load, 0).sum(axis=1)
    sent = np.where(local, 0, load).sum(axis=0)
    received = np.bincount(home, weights=sent, minlength=ranks).astype(np.int64)
    return stays + received, received
