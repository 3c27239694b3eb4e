"""FineEP: the copies of EPLB, and a linear program for the tokens."""

from __future__ import annotations

from dataclasses import dataclass

from prophet.planner.base import Planner
from prophet.planner.policies.eplb import EplbPlanner
from prophet.planner.split.exact import exact_split
from prophet.spec import IntArray, Placement, PlanContext, Split


@dataclass(frozen=True, kw_only=True, slots=True)
class FineEpPlanner(Planner):
    """FineEP: copies as fixed by EPLB's rule, tokens divided by a linear program for the lowest bottleneck."""

    extra_per_rank: int = 2
    name: str = "fine-ep"

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        return EplbPlanner(extra_per_rank=self.extra_per_rank).place(load, context)

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        # The exact split solves the same program in integers, local tokens first
        return exact_split(load, placement, context.topology)
