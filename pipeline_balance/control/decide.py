"""Whether another stage map is worth going to: functions from values to values.

Shape legend: L layers, P ranks, M microbatches. A map is changed only if the predicted gain over the coming steps
exceeds what the move is expected to cost. Why loads change is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from pipeline_balance.maps.compare import Choice, predicted_makespan_s
from pipeline_balance.maps.diffusion import diffuse
from pipeline_balance.maps.partition import (
    explain_memory,
    partition_by_parameters,
    partition_by_time,
    partition_near,
)
from pipeline_balance.maps.repack import repack
from pipeline_balance.spec import LayerCost, PartitionError, RankLimits, StageMap, fits, rank_loads_s
from prophet.errors import SpecError

Policy = Literal["partition", "partition-by-parameters", "diffusion", "diffusion-by-parameters"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveCost:
    """What a move is expected to cost: a fixed part for rebuilding, and the bytes of the busiest rank."""

    fixed_s: float = 0.1
    bytes_per_s: float = 1e9

    def __post_init__(self) -> None:
        if not (self.fixed_s >= 0 and self.bytes_per_s > 0):
            raise SpecError(f"a move's cost needs fixed_s >= 0 and bytes_per_s > 0, got {self}")

    def seconds(self, costs: Sequence[LayerCost], before: StageMap, after: StageMap, ranks: int) -> float:
        """Seconds to go from one map to the other; none if they are equal."""
        busiest = [0] * ranks
        for move in before.moves_to(after):
            for rank in (move.source, move.destination):
                busiest[rank] += costs[move.layer].moved_bytes
        return 0.0 if before == after else self.fixed_s + max(busiest) / self.bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerConfig:
    """`every_steps` steps lie between two decisions, the last `measure_steps` of them are measured.

    With `max_every_steps` that distance doubles up to this after every decision that found nothing to gain, and is
    `every_steps` again after a move. Where stages are refreshed (layers were frozen or thawed), loads have changed for
    certain: the next decision comes as soon as that has been measured.

    `min_gain` is the least relative gain that is taken for more than noise. `repack_slowdown` allows fewer ranks where
    the step becomes longer by at most this fraction of the best one on all ranks (None: never). `transfer_s` is what an
    activation takes between two stages. `horizon_steps` is for how many steps at most a change is expected to pay
    (None: four times `every_steps`); how much of a gain is still there from one decision to the next is learnt, and
    shortens that. `prepare_in_backward` measures, decides and prepares the move beside the backward pass before it, by
    what is known when that begins.
    """

    every_steps: int = 50
    measure_steps: int = 2
    policy: Policy = "partition"
    min_gain: float = 0.02
    repack_slowdown: float | None = None
    transfer_s: float = 0.0
    move_cost: MoveCost = field(default_factory=MoveCost)
    horizon_steps: int | None = None
    prepare_in_backward: bool = False
    max_every_steps: int | None = None

    def __post_init__(self) -> None:
        if self.every_steps < 1 or not 1 <= self.measure_steps <= self.every_steps:
            raise SpecError(f"need 1 <= measure_steps <= every_steps, got {self.measure_steps} and {self.every_steps}")
        if self.max_every_steps is not None and self.max_every_steps < self.every_steps:
            raise SpecError(
                f"max_every_steps must be at least every_steps ({self.every_steps}), got {self.max_every_steps}"
            )
        if self.horizon_steps is not None and self.horizon_steps < 1:
            raise SpecError(f"horizon_steps must be at least 1, got {self.horizon_steps}")
        if self.policy not in get_args(Policy):
            raise SpecError(f"policy must be one of {list(get_args(Policy))}, got {self.policy!r}")
        if self.min_gain < 0 or (self.repack_slowdown is not None and self.repack_slowdown < 0):
            raise SpecError("min_gain and repack_slowdown must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What was decided and why. `move` says whether `best` is worth going to from `current`."""

    move: bool
    current: StageMap
    best: StageMap
    current_makespan_s: float
    best_makespan_s: float
    move_s: float
    reason: str

    @property
    def gain_s(self) -> float:
        """Predicted seconds saved per step."""
        return self.current_makespan_s - self.best_makespan_s


def candidates(
    costs: Sequence[LayerCost],
    limits: Sequence[RankLimits],
    current: StageMap,
    ranks: Sequence[int],
    *,
    microbatches: int,
    policy: Policy,
) -> list[StageMap]:
    """Maps on `ranks` (in this order) that the policy proposes; empty if none fits."""
    there = [limits[r] for r in ranks]
    number = {rank: i for i, rank in enumerate(ranks)}
    local = StageMap.from_assignment(number.get(r, len(ranks)) for r in current.assignment())
    found: list[StageMap] = []
    try:
        if policy in ("diffusion", "diffusion-by-parameters"):
            start = local
            if local.ranks != tuple(range(len(ranks))):
                # layers that run elsewhere, or not in order, have no boundary to shift yet
                start = partition_near(costs, there, local, microbatches=microbatches, slack=float(len(costs)))
            measure = "time" if policy == "diffusion" else "parameters"
            found.append(
                diffuse(costs, there, start, microbatches=microbatches, measure=measure).stage_map  # type: ignore[arg-type]
            )
        elif policy == "partition-by-parameters":
            found.append(partition_by_parameters(costs, there, microbatches=microbatches))
        else:
            found.append(partition_by_time(costs, there, microbatches=microbatches))
            found += [
                partition_near(costs, there, local, microbatches=microbatches, slack=slack) for slack in (0.0, 0.01)
            ]
    except PartitionError:
        return []
    return [StageMap(m.boundaries, tuple(ranks[r] for r in m.ranks)) for m in found]


def decide(
    costs: Sequence[LayerCost],
    limits: Sequence[RankLimits],
    current: StageMap,
    *,
    microbatches: int,
    horizon_steps: int,
    config: ControllerConfig,
    missed_s: float = 0.0,
) -> Decision:
    """The map to go on with for `horizon_steps` steps. Equal figures give equal decisions on every rank.

    `missed_s` is what staying has lost since the last time there was nothing to gain: once that and the gain to come
    exceed a move's cost it is made, so no more is ever lost by waiting than a move would have taken.

    Raises `PartitionError` if nothing fits, the map in force included.
    """
    everyone = tuple(range(min(len(limits), len(costs))))
    now_fits = fits(costs, current, limits, microbatches)
    known: dict[StageMap, float] = {}

    def proposed(ranks: Sequence[int]) -> list[tuple[float, StageMap]]:
        found = candidates(costs, limits, current, ranks, microbatches=microbatches, policy=config.policy)
        found = [m for m in dict.fromkeys(found) if fits(costs, m, limits, microbatches)]
        return [(evaluate(m), m) for m in found if not hopeless(m)]

    def hopeless(stage_map: StageMap) -> bool:
        """Whether the slowest rank stays as slow, so that there is nothing to simulate, which costs most here."""
        if config.repack_slowdown is not None or not now_fits:
            return False
        loads = rank_loads_s(costs, stage_map, limits)
        return max(loads) > (1.0 - config.min_gain / 2) * max(rank_loads_s(costs, current, limits))

    def evaluate(stage_map: StageMap) -> float:
        if stage_map not in known:
            known[stage_map] = predicted_makespan_s(
                costs, stage_map, limits, microbatches=microbatches, transfer_s=config.transfer_s
            )
        return known[stage_map]

    def decision(move: bool, makespan_s: float, best: StageMap, reason: str) -> Decision:
        return Decision(
            move=move,
            current=current,
            best=best,
            current_makespan_s=now_s,
            best_makespan_s=makespan_s,
            move_s=config.move_cost.seconds(costs, current, best, len(limits)),
            reason=reason,
        )

    now_s = evaluate(current)
    options = proposed(everyone)
    if config.repack_slowdown is not None:
        allowed_s = min([s for s, _ in options], default=now_s) * (1.0 + config.repack_slowdown)
        packed = _packed(costs, limits, current, allowed_s, microbatches, config)
        if packed is not None:
            ranks = len(packed.stage_map.used_ranks)
            return decision(True, packed.makespan_s, packed.stage_map, f"{ranks} ranks suffice")
        # Ranks that were given up are taken back only when those in use no longer keep up, and by more than noise, else
        # the two rules would undo each other.
        on_used = proposed(_in_stage_order(current))
        if on_used and min(s for s, _ in on_used) <= allowed_s * (1.0 + config.min_gain):
            options = on_used
    elif current.used_ranks != everyone:
        options += proposed(_in_stage_order(current))
    if not options and not now_fits:
        why = explain_memory(costs, limits, microbatches)
        raise PartitionError(f"no stage map fits the ranks' memory, the one in force included: {why}")

    def net_s(option: tuple[float, StageMap]) -> float:
        cost_s = config.move_cost.seconds(costs, current, option[1], len(limits))
        return (now_s - option[0]) * horizon_steps - cost_s

    best_s, best = max(options, key=net_s, default=(now_s, current))
    gain_s = now_s - best_s
    if not now_fits:
        return decision(True, best_s, best, "the map in force no longer fits")
    if best == current or gain_s <= config.min_gain * now_s:
        return decision(False, best_s, best, "nothing to gain")
    cost_s = config.move_cost.seconds(costs, current, best, len(limits))
    if net_s((best_s, best)) + missed_s <= 0:
        return decision(False, best_s, best, f"{gain_s * horizon_steps:.3g} s gained would not pay {cost_s:.3g} s")
    return decision(True, best_s, best, f"gains {gain_s * horizon_steps:.3g} s for {cost_s:.3g} s")


def _in_stage_order(stage_map: StageMap) -> tuple[int, ...]:
    """Ranks in use, each where its first stage stands."""
    return tuple(dict.fromkeys(stage_map.ranks))


def _packed(
    costs: Sequence[LayerCost],
    limits: Sequence[RankLimits],
    current: StageMap,
    allowed_s: float,
    microbatches: int,
    config: ControllerConfig,
) -> Choice | None:
    """The best map on the fewest ranks, fewer than those in use, whose step takes at most `allowed_s`."""
    fastest = sorted((r.speed for r in limits), reverse=True)
    work_s = sum(c.total_s for c in costs) * microbatches
    for size in range(1, len(current.used_ranks)):
        if work_s / sum(fastest[:size]) > allowed_s:
            continue
        try:
            packed = repack(
                costs,
                limits,
                current,
                microbatches=microbatches,
                target_ranks=size,
                transfer_s=config.transfer_s,
            )
        except PartitionError:
            continue
        if packed.choice.makespan_s <= allowed_s:
            return packed.choice
    return None
