"""Plain expert parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from prophet.planner.base import Planner
from prophet.planner.policies.splits import local_split
from prophet.spec import IntArray, Placement, PlanContext, Split


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
