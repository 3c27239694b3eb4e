"""The heaviest experts on all ranks: the policies top2 and top3 of Pro-Prophet, section VI-C."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prophet.errors import SpecError
from prophet.planner.base import Planner
from prophet.planner.policies.copies import Copies
from prophet.planner.policies.splits import local_split
from prophet.spec import IntArray, Placement, PlanContext, Split, check_load


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKPlanner(Planner):
    """Replicates the k experts with the most tokens on every rank. `k`: 2 and 3 are the paper's top2 and top3."""

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
