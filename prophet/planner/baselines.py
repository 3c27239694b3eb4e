"""Published placement policies, each from its paper's description, to compare with.

Shape legend: R ranks (D of the Pro-Prophet paper), E experts.

All respect the context's slot limits: a rank whose slots are taken is passed over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prophet.errors import SpecError
from prophet.planner.base import Planner
from prophet.planner.cost import paper_cost
from prophet.planner.split import local_split
from prophet.spec import BoolArray, IntArray, Placement, PlanContext, Split, StepCost, check_load


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticPlanner(Planner):
    """Plain expert parallelism: no replicas."""

    name: str = "static"

    @property
    def replicates(self) -> bool:
        return False

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        del load
        return context.homes_only()

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        del context
        return local_split(load, placement)


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKPlanner(Planner):
    """The k experts with the most tokens on every rank (Pro-Prophet, section VI-C, its policies top2 and
    top3).
    """

    k: int = 2
    name: str = "top-k"

    def __post_init__(self) -> None:
        if self.k < 0:
            raise SpecError(f"top-k planner: k must not be negative, got {self.k}")

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        load = check_load(load)
        heaviest = np.argsort(-load.sum(axis=0), kind="stable")[: self.k]
        state = Copies.of(context)
        for expert in heaviest:
            state.copy_to(int(expert), np.arange(context.ranks))
        return state.placement()

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        del context
        return local_split(load, placement)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProProphetPlanner(Planner):
    """Pro-Prophet's greedy search (Algorithm 1), scored with its Eq. 8.

    `n` is the number of ranks that do not get a replicated expert, `None` to try every n and keep the best.
    `alpha` is the balance coefficient of Eq. 7. Where the printed algorithm is unclear: with several experts
    per rank the heaviest rank gives its heaviest expert that was not taken yet; loads are computed before
    they are scored; the search ends when the load is balanced.
    """

    n: int | None = None
    alpha: float = 0.5
    name: str = "pro-prophet"

    def __post_init__(self) -> None:
        if self.alpha < 0 or (self.n is not None and self.n < 0):
            raise SpecError(f"pro-prophet planner: n and alpha must not be negative, got {self.n}, {self.alpha}")

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        load = check_load(load)
        if load.shape != (context.ranks, context.experts):
            raise SpecError(f"load must be [{context.ranks}, {context.experts}], got {list(load.shape)}")
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
        """Algorithm 1 for one n: (predicted seconds, placement)."""
        experts = load.shape[1]
        home = np.asarray(context.home, dtype=np.int64)
        total = load.sum(axis=0)
        state = Copies.of(context)
        computed, received = local_loads(load, state.holds, home)
        best_s = self._score(computed, received, 0, n, context).total_s
        best = state.holds.copy()
        balanced = self.alpha * float(total.sum()) / experts
        taken = np.zeros(experts, dtype=np.bool_)
        replicated = 0
        while computed.max() - computed.min() >= balanced:
            candidates = np.flatnonzero((home == computed.argmax()) & ~taken)
            if candidates.size == 0:
                break
            expert = int(candidates[total[candidates].argmax()])
            taken[expert] = True
            order = np.argsort(load[:, expert], kind="stable")
            order = order[order != home[expert]]
            state.copy_to(expert, order[min(n, order.size) :])
            replicated += 1
            computed, received = local_loads(load, state.holds, home)
            seconds = self._score(computed, received, replicated, n, context).total_s
            if seconds < best_s:
                best_s = seconds
                best = state.holds.copy()
        return best_s, Placement(home, best)

    def _score(self, computed: IntArray, received: IntArray, replicated: int, n: int, context: PlanContext) -> StepCost:
        return paper_cost(computed, received, replicated=replicated, excluded=n, context=context)


def local_loads(load: IntArray, holds: BoolArray, home: IntArray) -> tuple[IntArray, IntArray]:
    """H and R of the paper, both [R], when tokens stay where their expert is held and go home otherwise."""
    ranks = load.shape[0]
    local = holds.T
    stays = np.where(local, load, 0).sum(axis=1)
    leaves = np.where(local, 0, load).sum(axis=0)
    received = np.bincount(home, weights=leaves, minlength=ranks).astype(np.int64)
    return stays + received, received


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
