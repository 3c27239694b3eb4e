"""LAER-MoE: the better of two ways to count copies, packed over nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prophet.planner.base import Planner
from prophet.planner.model.cost import exchange_seconds
from prophet.planner.policies.copies import heap_copies, pack, slots_of
from prophet.planner.policies.splits import even_amounts, fill
from prophet.spec import FloatArray, IntArray, Placement, PlanContext, Split, check_load


@dataclass(frozen=True, kw_only=True, slots=True)
class LaerPlanner(Planner):
    """LAER-MoE: even or heap-made copy counts, packed over the least covered nodes; the better by its own score."""

    extra_per_rank: int = 2
    name: str = "laer"

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        load = check_load(load)
        total = load.sum(axis=0)
        slots = slots_of(context, self.extra_per_rank)
        # The first of the two candidates that LAER-MoE scores; the other one follows the load
        spread = np.full(context.experts, slots // context.experts, dtype=np.int64)
        spread[np.argsort(-total, kind="stable")[: slots % context.experts]] += 1
        best: tuple[float, Placement] | None = None
        for copies in (np.minimum(spread, context.ranks - 1), heap_copies(total, slots, context.ranks - 1)):
            placement = pack(copies, total, context, by_node=True)
            split = self.split(load, placement, context)
            pairs: FloatArray = split.pairs().astype(np.float64) * context.shape.token_bytes
            # Its score: four all-to-alls, one forward and two backward products, and no transfers of replicas
            seconds_per_token = context.shape.forward_flops_per_token / np.asarray(context.topology.flops_per_s)
            score = 4 * exchange_seconds(pairs, context.topology)
            score += 3 * float((split.rank_load() * seconds_per_token).max())
            if best is None or score < best[0]:
                best = (score, placement)
        return best[1] if best is not None else context.homes_only()

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        load = check_load(load)
        return fill(load, even_amounts(load, placement), placement, context.topology.node_ids())
