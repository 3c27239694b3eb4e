"""DeepSeek's expert-parallelism load balancer (github.com/deepseek-ai/EPLB), its global rule."""

from __future__ import annotations

from dataclasses import dataclass

from prophet.errors import SpecError
from prophet.planner.base import Planner
from prophet.planner.policies.copies import heap_copies, pack, slots_of
from prophet.planner.policies.splits import even_amounts, fill
from prophet.spec import IntArray, Placement, PlanContext, Split, check_load


@dataclass(frozen=True, kw_only=True, slots=True)
class EplbPlanner(Planner):
    """DeepSeek's EPLB: a fixed number of extra slots, heaviest load per copy first, greedy packing, even shares.

    `extra_per_rank`: extra slots per rank, within the context's limits.
    """

    extra_per_rank: int = 2
    name: str = "eplb"

    def __post_init__(self) -> None:
        if self.extra_per_rank < 0:
            raise SpecError(f"{self.name} planner: extra_per_rank must not be negative, got {self.extra_per_rank}")

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        total = check_load(load).sum(axis=0)
        # At most R - 1 replicas of an expert: its home holds it already
        copies = heap_copies(total, slots_of(context, self.extra_per_rank), context.ranks - 1)
        return pack(copies, total, context)

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        load = check_load(load)
        return fill(load, even_amounts(load, placement), placement, context.topology.node_ids())
