"""FasterMoE: "Modeling and Optimizing Training of Large-Scale Dynamic Pre-Trained Models" (He et al., PPoPP 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prophet.planner.base import Planner
from prophet.planner.policies.copies import Copies
from prophet.planner.policies.splits import local_split
from prophet.spec import IntArray, Placement, PlanContext, Split, check_load


@dataclass(frozen=True, kw_only=True, slots=True)
class FasterMoEPlanner(Planner):
    """FasterMoE's dynamic shadowing (He et al., PPoPP 2022): heavy experts on all ranks while its model improves.

    Its model: (3c + 4f) b for the heaviest expert not shadowed, and 2 alpha dim^2 bytes / bandwidth per shadowed one.
    """

    name: str = "fastermoe"

    def place(self, load: IntArray, context: PlanContext) -> Placement:
        load = check_load(load)
        shape, topology = context.shape, context.topology
        bandwidth = topology.intra.bytes_per_s if topology.nodes == 1 else topology.even_inter.bytes_per_s
        # f is a forward product, and its backward takes two; c is one of the four all-to-alls
        per_token_s = 3 * shape.forward_flops_per_token / float(np.mean(topology.flops_per_s))
        per_token_s += 4 * shape.token_bytes / bandwidth
        shadow_s = 2 * shape.expert_bytes / bandwidth
        total = load.sum(axis=0)
        order = np.argsort(-total, kind="stable")
        best_s = per_token_s * float(total[order[0]])
        state = Copies.of(context)
        for i, e in enumerate(order[:-1], start=1):
            seconds = per_token_s * float(total[order[i]]) + i * shadow_s
            # Its greedy rule: it ends with the first expert that does not pay, though a later one might
            if seconds >= best_s:
                break
            best_s = seconds
            state.copy_to(int(e), np.arange(context.ranks))
        return state.placement()

    def split(self, load: IntArray, placement: Placement, context: PlanContext) -> Split:
        del context
        return local_split(load, placement)
