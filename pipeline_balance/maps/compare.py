"""Comparing stage maps: by bottleneck, then simulated makespan, then bytes moved, then order of mention.

Shape legend: S stages, P ranks, M microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline_balance.schedules.flexible import flexible
from pipeline_balance.schedules.links import Transfers, between_stages, pace_s
from pipeline_balance.schedules.simulate import Durations, simulate
from pipeline_balance.spec import (
    LayerCost,
    PartitionError,
    RankLimits,
    StageMap,
    fits,
    in_flight,
    moved_bytes,
    rank_loads_s,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedMap:
    """A stage map and what is expected of it.

    Attributes:
        stage_map: The map.
        makespan_s: Simulated seconds of a step.
        moved_bytes: State that changes ranks, from the map in force.
    """

    stage_map: StageMap
    makespan_s: float
    moved_bytes: int


def dense_ranks(stage_map: StageMap) -> StageMap:
    """The same map with its ranks renumbered 0, 1, .. in ascending order: the group without idle ranks."""
    number = {rank: i for i, rank in enumerate(stage_map.used_ranks)}
    return StageMap(stage_map.boundaries, tuple(number[r] for r in stage_map.ranks))


def predicted_makespan_s(
    costs: Sequence[LayerCost],
    stage_map: StageMap,
    limits: Sequence[RankLimits],
    *,
    microbatches: int,
    transfer_s: Transfers = 0.0,
    between_s: float = 0.0,
) -> float:
    """Simulated seconds of one training step, all microbatches forward and backward, under the flexible schedule.

    Args:
        costs: Of every layer [L].
        stage_map: Which rank runs which layers.
        limits: Memory and speed of every rank [P].
        microbatches: M.
        transfer_s: Seconds of a message between stages, or between any two ranks [P, P].
        between_s: What the runtime takes between two actions.
    """
    speeds = [r.speed for r in limits]
    durations = Durations.of_stages(costs, stage_map, speeds=speeds, transfer_s=transfer_s, between_s=between_s)
    # torch's runtime cannot drive a rank without a stage, so ranks in use are counted anew
    schedule = flexible(dense_ranks(stage_map).ranks, microbatches, durations=durations)
    return simulate(schedule, durations).makespan_s


def bottleneck_s(
    costs: Sequence[LayerCost], stage_map: StageMap, limits: Sequence[RankLimits], transfer_s: Transfers = 0.0
) -> float:
    """The least seconds from one microbatch to the next, whatever their number.

    Args:
        costs: Of every layer [L].
        stage_map: Which rank runs which layers.
        limits: Memory and speed of every rank [P].
        transfer_s: Seconds of a message between stages, or between any two ranks [P, P].
    """
    loads = rank_loads_s(costs, stage_map, limits)
    # stages of one rank take turns, so what is under way in a run of them is another number
    if not _one_stage_each(stage_map):
        return max(loads)
    links = between_stages(transfer_s, stage_map.ranks).tolist()
    return pace_s([loads[rank] for rank in stage_map.ranks], links)


def least_step_s(
    costs: Sequence[LayerCost],
    stage_map: StageMap,
    limits: Sequence[RankLimits],
    *,
    microbatches: int,
    transfer_s: Transfers = 0.0,
) -> float:
    """Seconds that no step is shorter than, whatever the order in which ranks take what is ready.

    Args:
        costs: Of every layer [L].
        stage_map: Which rank runs which layers.
        limits: Memory and speed of every rank [P].
        microbatches: M.
        transfer_s: Seconds of a message between stages, or between any two ranks [P, P].
    """
    loads = rank_loads_s(costs, stage_map, limits)
    if not _one_stage_each(stage_map):
        return microbatches * max(loads)
    links = between_stages(transfer_s, stage_map.ranks).tolist()
    left = sum(loads) + 2 * sum(links)
    least = before = 0.0
    for stage, (rank, link) in enumerate(zip(stage_map.ranks, [*links, 0.0], strict=True)):
        # as many microbatches as the stage may hold are behind it at once, each of them there and back
        rounds = -(-microbatches // in_flight(stage, stage_map.stages, microbatches))
        # the first one has come up to here, and the last one goes all the way back
        least = max(least, before + max(microbatches * loads[rank], rounds * left))
        before += loads[rank] + 2 * link
        left -= loads[rank] + 2 * link
    return least


def best_map(
    stage_maps: Iterable[StageMap],
    costs: Sequence[LayerCost],
    limits: Sequence[RankLimits],
    *,
    microbatches: int,
    current: StageMap,
    transfer_s: Transfers = 0.0,
) -> ComparedMap:
    """The best of the maps that fit; figures within 1e-9 (relative) of the best tie.

    Args:
        stage_maps: What is compared; of equal maps the first one is returned.
        costs: Of every layer [L].
        limits: Memory and speed of every rank [P].
        microbatches: M.
        current: The map in force, from which moved bytes are counted.
        transfer_s: Seconds of a message between stages, or between any two ranks [P, P].

    Raises:
        PartitionError: If none fits.
    """
    # several ways of searching find the same map: each is simulated once
    fitting = [m for m in dict.fromkeys(stage_maps) if fits(costs, m, limits, microbatches)]
    if not fitting:
        raise PartitionError("none of the stage maps fits the ranks' memory")
    bottlenecks_s = {m: bottleneck_s(costs, m, limits, transfer_s) for m in fitting}
    if np.any(transfer_s):
        # of ranks with several stages only a lower bound is known, so the simulator compares these
        bottlenecks_s = {m: s for m, s in bottlenecks_s.items() if _one_stage_each(m)}
    least = min(bottlenecks_s.values(), default=0.0)
    compared = [
        ComparedMap(
            stage_map=stage_map,
            makespan_s=predicted_makespan_s(costs, stage_map, limits, microbatches=microbatches, transfer_s=transfer_s),
            moved_bytes=moved_bytes(costs, current, stage_map),
        )
        for stage_map in fitting
        # only these are simulated: a simulation costs far more than a sum
        if _ties(bottlenecks_s.get(stage_map, least), least)
    ]
    shortest = min(c.makespan_s for c in compared)
    tied = [c for c in compared if _ties(c.makespan_s, shortest)]
    return min(tied, key=lambda c: c.moved_bytes)


def _one_stage_each(stage_map: StageMap) -> bool:
    return len(set(stage_map.ranks)) == stage_map.stages


def _ties(value: float, best: float) -> bool:
    # sums of floats in another order differ in their last digits; that must not decide
    return math.isclose(value, best, rel_tol=1e-9)
