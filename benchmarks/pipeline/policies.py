"""The policies that are compared: which stage map is in force at which step.

Shape legend: L layers, P ranks, M microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipeline_balance.control.controller import ControllerConfig, MoveCost
from pipeline_balance.maps.compare import dense_ranks, predicted_makespan_s
from pipeline_balance.maps.partition import (
    partition_by_parameters,
    partition_by_time,
    partition_near,
    partition_uniform,
)
from pipeline_balance.schedules.flexible import flexible
from pipeline_balance.schedules.links import Transfers
from pipeline_balance.schedules.simulate import Durations, simulate
from pipeline_balance.spec import LayerCost, RankLimits, StageMap

STATIC_OPTIMAL = "optimal-at-start"
STATIC = ("uniform", "parameters", STATIC_OPTIMAL)
DYNAMIC = ("partition", "diffusion", "partition-repack")
ORACLE = "oracle"
POLICIES = (*STATIC, *DYNAMIC, ORACLE)
DEFAULT_POLICIES = (STATIC_OPTIMAL, "partition", "diffusion", ORACLE)


class PolicyError(ValueError):
    """There is no such policy, or the options contradict each other."""


def check_policies(names: Sequence[str]) -> None:
    unknown = [n for n in names if n not in POLICIES]
    if unknown or not names:
        raise PolicyError(f"policies must be of {', '.join(POLICIES)}, got {', '.join(unknown) or 'none'}")


def controller_config(
    policy: str, every_steps: int, *, transfer_s: float, bytes_per_s: float, fixed_s: float
) -> ControllerConfig:
    """How a dynamic policy runs the controller."""
    return ControllerConfig(
        every_steps=every_steps,
        measure_steps=min(2, every_steps),
        policy="diffusion" if policy == "diffusion" else "partition",
        repack_slowdown=0.1 if policy == "partition-repack" else None,
        transfer_s=transfer_s,
        move_cost=MoveCost(fixed_s=fixed_s, bytes_per_s=bytes_per_s),
        # where every step ends with a decision, loads last longer than one
        horizon_steps=10 if every_steps == 1 else None,
        # while there is nothing to gain, deciding every time would only cost
        max_every_steps=32 if every_steps == 1 else 2 * every_steps,
        # worked out beside the step, as is most of a move
        prepare_in_backward=True,
    )


def start_map(policy: str, costs: Sequence[LayerCost], ranks: int, microbatches: int, transfer_s: float) -> StageMap:
    """The map with which a policy goes into the counted steps; `costs` were measured during the warm-up."""
    limits = RankLimits.uniform(ranks)
    if policy == "uniform":
        return partition_uniform(costs, limits, microbatches=microbatches)
    if policy == "parameters":
        return partition_by_parameters(costs, limits, microbatches=microbatches)
    uniform = partition_uniform(costs, limits, microbatches=microbatches)
    return best_map(costs, ranks, microbatches, uniform, transfer_s)


def best_map(
    costs: Sequence[LayerCost], ranks: int, microbatches: int, previous: StageMap, transfer_s: float
) -> StageMap:
    """The map with the least simulated step; the previous one where no other is better by a third of a percent."""
    limits = RankLimits.uniform(ranks)
    tried = [previous, partition_by_time(costs, limits, microbatches=microbatches)]
    tried += [partition_near(costs, limits, previous, microbatches=microbatches, slack=s) for s in (0.0, 0.02, 0.05)]
    times = {
        m: predicted_makespan_s(costs, m, limits, microbatches=microbatches, transfer_s=transfer_s)
        for m in dict.fromkeys(tried)
    }
    best = min(times, key=lambda m: times[m])
    return best if times[best] < (1 - 1 / 300) * times[previous] else previous


def smoothed(history: Sequence[Sequence[LayerCost]], window: int = 3) -> list[LayerCost]:
    """Per layer the median of its times over the last steps: what a step takes, without what disturbed it."""
    recent = history[-window:]

    def median(layer: int, name: str) -> float:
        return float(np.median([getattr(costs[layer], name) for costs in recent]))

    return [
        replace(
            cost,
            forward_s=median(i, "forward_s"),
            backward_input_s=median(i, "backward_input_s"),
            backward_weight_s=median(i, "backward_weight_s"),
        )
        for i, cost in enumerate(recent[-1])
    ]


def simulated_step_s(
    costs: Sequence[LayerCost],
    stage_map: StageMap,
    *,
    microbatches: int,
    transfer_s: Transfers,
    optimizer_s_per_byte: float,
    between_s: float = 0.0,
    around_s: float = 0.0,
) -> float:
    """Seconds of one step: the pipeline, means over replicas, then every rank's optimizer.

    `optimizer_s_per_byte` is of a rank's trainable parameters; `between_s` is what the runtime takes from one action to
    the next. `around_s` is what it takes besides: agreeing on the batch, sharing the loss, ending the update.
    """
    dense = dense_ranks(stage_map)
    durations = Durations.of_stages(costs, dense, transfer_s=transfer_s, between_s=between_s)
    schedule = flexible(dense.ranks, microbatches, durations=durations)
    done = simulate(schedule, durations)
    return around_s + max(
        max(*(done.end_s[a] for a in row), done.reduced_s[rank])
        + optimizer_s_per_byte * sum(costs[i].gradient_bytes for i in dense.layers_on(rank))
        for rank, row in enumerate(schedule.actions)
    )
