"""Re-homing: rare swaps of homes that pay for themselves over many steps. Decision only; nothing is moved here.

Shape legend: R ranks, E experts.

A swap exchanges the homes of two experts on different ranks, so every rank keeps its number of experts. It pays where
several hot experts share a home, or where an expert's tokens come from another node, and the skew lasts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from prophet.errors import SpecError
from prophet.planner.base import Planner
from prophet.planner.model.cost import step_cost
from prophet.spec import IntArray, LayerShape, PlanContext, Topology, check_load

Swap = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Swaps of homes, in order, with their gain and cost.

    Attributes:
        swaps: Pairs of experts.
        home: The homes afterwards, [E].
        saving_s: Seconds saved in every step.
        cost_s: Seconds to pay once.
    """

    swaps: tuple[Swap, ...]
    home: tuple[int, ...]
    saving_s: float
    cost_s: float

    @property
    def break_even_steps(self) -> float:
        """Steps after which the move has paid for itself; infinite where it saves nothing."""
        return self.cost_s / self.saving_s if self.saving_s > 0 else float("inf")


def swap_seconds(a: int, b: int, topology: Topology, shape: LayerShape, state_bytes_per_param: int) -> float:
    """Return the seconds to exchange two experts between their ranks.

    Args:
        a: The one rank.
        b: The other rank.
        topology: The machine.
        shape: The size of an expert.
        state_bytes_per_param: Bytes that move with a parameter, its gradient and its optimizer state included.
    """
    # Both directions at once, as a link carries them
    link = topology.intra if topology.node_of(a) == topology.node_of(b) else topology.inter
    return link.seconds(shape.expert_params * state_bytes_per_param)


def propose(
    load: IntArray,
    context: PlanContext,
    planner: Planner,
    *,
    steps_ahead: int,
    state_bytes_per_param: int = 16,
    max_swaps: int = 4,
    candidates: int = 8,
) -> Proposal:
    """Propose swaps whose saving over the steps to come exceeds their cost.

    Args:
        load: Tokens [R, E] of the steps to come.
        context: The machine, the layer and the present homes.
        planner: Places and splits before and after a swap, so replicas that already mend the skew leave nothing to
            save.
        steps_ahead: Steps in which the load is expected to last.
        state_bytes_per_param: Bytes that move with a parameter; 16 is float32 master weights, two Adam moments and a
            copy.
        max_swaps: Swaps to propose at most.
        candidates: In every round so many of the heaviest experts are tried against as many of the lightest.

    Raises:
        SpecError: For sizes that contradict one another, or are out of range.
    """
    load = check_load(load)
    if load.shape != (context.ranks, context.experts):
        raise SpecError(f"load must be [{context.ranks}, {context.experts}], got {list(load.shape)}")
    if steps_ahead < 0 or state_bytes_per_param <= 0 or max_swaps < 0 or candidates < 1:
        raise SpecError("rehome: steps_ahead and max_swaps must not be negative, sizes and candidates be positive")

    def seconds(home: tuple[int, ...]) -> float:
        # A previous placement belongs to the old homes
        moved = replace(context, home=home, previous=None)
        placement = planner.place(load, moved)
        return step_cost(planner.split(load, placement, moved), placement, moved).total_s

    home = context.home
    before_s = now_s = seconds(home)
    cost_s = 0.0
    swaps: list[Swap] = []
    # Once for all rounds: an expert's tokens do not depend on its home
    order = [int(e) for e in np.argsort(-load.sum(axis=0), kind="stable")]
    for _ in range(max_swaps):
        best: tuple[float, float, float, Swap, tuple[int, ...]] | None = None
        for a in order[:candidates]:
            for b in order[::-1][:candidates]:
                # A swap within a rank changes nothing
                if home[a] == home[b]:
                    continue
                after = list(home)
                after[a], after[b] = home[b], home[a]
                after_s = seconds(tuple(after))
                move_s = swap_seconds(home[a], home[b], context.topology, context.shape, state_bytes_per_param)
                gain_s = (now_s - after_s) * steps_ahead - move_s
                if gain_s > 0 and (best is None or gain_s > best[0]):
                    best = (gain_s, after_s, move_s, (a, b), tuple(after))
        if best is None:
            break
        # The next round starts from the homes after this swap
        _, now_s, move_s, swap, home = best
        cost_s += move_s
        swaps.append(swap)
    return Proposal(swaps=tuple(swaps), home=home, saving_s=before_s - now_s, cost_s=cost_s)
