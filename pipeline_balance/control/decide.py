"""Whether another stage map is worth going to: functions from values to values.

Shape legend: L layers, P ranks, M microbatches. A map is changed only if the predicted gain over the coming steps
exceeds what the move is expected to cost. Why loads change does not matter here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from pipeline_balance.maps.compare import ComparedMap, bottleneck_s, least_step_s, predicted_makespan_s
from pipeline_balance.maps.diffusion import Load, diffuse
from pipeline_balance.maps.partition import (
    explain_memory,
    maps_on,
    partition_by_parameters,
    partition_by_time,
    partition_near,
)
from pipeline_balance.maps.repack import repack
from pipeline_balance.schedules.links import Transfers, checked_transfers, grown
from pipeline_balance.spec import LayerCost, PartitionError, RankLimits, StageMap, fits
from prophet.errors import SpecError
from prophet.spec import checked

Policy = Literal["partition", "partition-by-parameters", "diffusion", "diffusion-by-parameters"]


@checked
@dataclass(frozen=True, kw_only=True, slots=True)
class MoveCost:
    """What a move is expected to cost: a fixed part for rebuilding, and the bytes of the busiest rank.

    Attributes:
        fixed_s: Seconds, whatever moves.
        bytes_per_s: Rate at which the busiest rank sends and receives.
    """

    fixed_s: float = 0.1
    bytes_per_s: float = 1e9

    def __post_init__(self) -> None:
        if not (self.fixed_s >= 0 and self.bytes_per_s > 0):
            raise SpecError(f"a move's cost needs fixed_s >= 0 and bytes_per_s > 0, got {self}")

    def seconds(self, costs: Sequence[LayerCost], before: StageMap, after: StageMap, ranks: int) -> float:
        """Predict the seconds of a move; none if the maps are equal.

        Args:
            costs: [L] the layers.
            before: The map in force.
            after: The map to go to.
            ranks: P.
        """
        busiest = [0] * ranks
        for move in before.moves_to(after):
            # a rank's port carries what it sends and what it receives
            for rank in (move.source, move.destination):
                busiest[rank] += costs[move.layer].moved_bytes
        return 0.0 if before == after else self.fixed_s + max(busiest) / self.bytes_per_s


@checked
@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerConfig:
    """When the controller of a pipeline measures, and which moves pay.

    Freezing or thawing layers changes the loads: the next decision comes as soon as they have been measured.

    Attributes:
        every_steps: Steps between two decisions. After each decision that finds nothing to gain, that distance doubles
            up to `max_every_steps`. After a move it is `every_steps` again.
        measure_steps: How many of them are measured, the last ones.
        policy: "partition" (the exact search over all maps) or "diffusion" (single layers between neighbours). With
            "-by-parameters" behind either, a layer's parameters count in place of its time.
        min_gain: The least relative gain that counts as more than noise.
        repack_slowdown: Allows fewer ranks where a step then gets longer by at most this fraction of the best step on
            all ranks (None: never).
        choose_microbatches: Whether the number of microbatches is chosen again once layers have moved to fewer ranks,
            from some steps with another number. Never more than the pipeline was made with. Not for models that treat
            a microbatch as a whole: see `ElasticPipeline.change_microbatches`.
        transfer_s: Seconds that an activation takes between two stages where no link has been measured.
        move_cost: What a move is taken to cost before one was measured.
        horizon_steps: For how many steps a gain is expected to last at most (None: four times `every_steps`), and
            shorter where earlier gains did.
        prepare_in_backward: Whether the controller decides and prepares a move beside a step, from the times of the
            steps before. Parameters and optimizer state then travel beside it, and layers move before the update.
        max_every_steps: The longest distance between two decisions (None: `every_steps`).

    Raises:
        SpecError: Values contradict each other.
    """

    every_steps: int = 50
    measure_steps: int = 2
    policy: Policy = "partition"
    min_gain: float = 0.02
    repack_slowdown: float | None = None
    choose_microbatches: bool = False
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
        if self.choose_microbatches and self.repack_slowdown is None:
            raise SpecError("choose_microbatches needs repack_slowdown, without which layers never move to fewer ranks")
        if self.min_gain < 0 or (self.repack_slowdown is not None and self.repack_slowdown < 0):
            raise SpecError("min_gain and repack_slowdown must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What was decided and why.

    Attributes:
        move: Whether to go from `current` to `best`.
        gains: Whether the predicted gain is more than noise, whether or not it pays for the move.
        current: The map in force.
        best: The best map that was found.
        current_makespan_s: Predicted seconds of a step on `current`.
        best_makespan_s: Predicted seconds of a step on `best`.
        move_s: Expected seconds of the move.
        reason: The decision in one phrase, for people.
    """

    move: bool
    gains: bool
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


def decide(
    costs: Sequence[LayerCost],
    limits: Sequence[RankLimits],
    current: StageMap,
    *,
    microbatches: int,
    horizon_steps: int,
    config: ControllerConfig,
    missed_s: float = 0.0,
    first_ranks: int = 0,
    transfer_s: Transfers | None = None,
) -> Decision:
    """Choose the map to go on with. Equal figures give equal decisions on every rank.

    Args:
        costs: [L] the layers.
        limits: [P] the ranks' memory and speed.
        current: The map in force.
        microbatches: M.
        horizon_steps: For how many steps a gain counts.
        config: Which moves pay.
        missed_s: What staying has lost since the last time there was nothing to gain. Once that and the gain to come
            exceed a move's cost, the move is made. So waiting never loses more than a move would have taken.
        first_ranks: How many ranks the run began with. `repack_slowdown` compares with a step on as many, however often
            it has packed since.
        transfer_s: Measured seconds of a message between any two ranks [P, P] (None: those of `config`).

    Raises:
        PartitionError: Nothing fits, the map in force included.
    """
    links = config.transfer_s if transfer_s is None else checked_transfers(transfer_s, len(limits))
    compared = _Comparison(costs, limits, current, microbatches, config, links)
    everyone = tuple(range(min(len(limits), len(costs))))
    options = compared.proposed(everyone)
    if config.repack_slowdown is not None:
        allowed_s = compared.first_s(options, first_ranks) * (1.0 + config.repack_slowdown)
        packed = compared.packed(allowed_s)
        if packed is not None:
            ranks = len(packed.stage_map.used_ranks)
            return compared.decision(True, packed.makespan_s, packed.stage_map, f"{ranks} ranks suffice")
        # Ranks that were given up are taken back only when those in use no longer keep up, and by more than noise, else
        # the two rules would undo each other.
        on_used = compared.proposed(_in_stage_order(current))
        if on_used and min(s for s, _ in on_used) <= allowed_s * (1.0 + config.min_gain):
            options = on_used
    elif current.used_ranks != everyone:
        # a map on all ranks may cost more to reach than it gains, where one on those in use pays
        options += compared.proposed(_in_stage_order(current))
    if not options and not compared.now_fits:
        why = explain_memory(costs, limits, microbatches)
        raise PartitionError(f"no stage map fits the ranks' memory, the one in force included: {why}")

    def net_s(option: tuple[float, StageMap]) -> float:
        return (compared.now_s - option[0]) * horizon_steps - compared.move_s(option[1])

    # the best map is the one that is worth most once the move is paid, not the fastest one
    best_s, best = max(options, key=net_s, default=(compared.now_s, current))
    # a rank would run out of memory: no gain is asked for
    if not compared.now_fits:
        return compared.decision(True, best_s, best, "the map in force no longer fits")
    stay = compared.decision(False, best_s, best, "nothing to gain")
    if not stay.gains:
        return stay
    gain_s, cost_s = stay.gain_s * horizon_steps, stay.move_s
    if net_s((best_s, best)) + missed_s <= 0:
        return replace(stay, reason=f"{gain_s:.3g} s gained would not pay {cost_s:.3g} s")
    return replace(stay, move=True, reason=f"gains {gain_s:.3g} s for {cost_s:.3g} s")


class _Comparison:
    """Stage maps compared with the one in force, by the step that the simulator predicts; each is simulated once."""

    def __init__(
        self,
        costs: Sequence[LayerCost],
        limits: Sequence[RankLimits],
        current: StageMap,
        microbatches: int,
        config: ControllerConfig,
        transfer_s: Transfers,
    ) -> None:
        self.costs, self.limits, self.current = costs, limits, current
        self.microbatches, self.config, self.transfer_s = microbatches, config, transfer_s
        self._known_s: dict[StageMap, float] = {}
        self.now_fits = fits(costs, current, limits, microbatches)
        self.now_s = self.makespan_s(current)

    def makespan_s(self, stage_map: StageMap) -> float:
        """Predicted seconds of a step."""
        if stage_map not in self._known_s:
            self._known_s[stage_map] = predicted_makespan_s(
                self.costs, stage_map, self.limits, microbatches=self.microbatches, transfer_s=self.transfer_s
            )
        return self._known_s[stage_map]

    def move_s(self, stage_map: StageMap) -> float:
        """Expected seconds of a move from the map in force."""
        return self.config.move_cost.seconds(self.costs, self.current, stage_map, len(self.limits))

    def proposed(self, ranks: Sequence[int]) -> list[tuple[float, StageMap]]:
        """The policy's maps on `ranks` (in this order) that fit and may gain, each with its makespan."""
        propose = partial(_maps_of_policy, self.costs, microbatches=self.microbatches, policy=self.config.policy)
        found = maps_on(ranks, self.limits, self.current, propose, self.transfer_s)
        # policies may propose the same map twice
        fitting = [m for m in dict.fromkeys(found) if fits(self.costs, m, self.limits, self.microbatches)]
        return [(self.makespan_s(m), m) for m in fitting if not self._cannot_gain(m)]

    def _cannot_gain(self, stage_map: StageMap) -> bool:
        """Whether no step on the map can be short enough: then there is nothing to simulate, which costs most here."""
        if self.config.repack_slowdown is not None or not self.now_fits:
            return False
        # with the step in force and not with its bound, which slow links or few microbatches leave far below it
        known: dict[str, Any] = {"microbatches": self.microbatches, "transfer_s": self.transfer_s}
        least_s = least_step_s(self.costs, stage_map, self.limits, **known)
        return least_s > (1.0 - self.config.min_gain) * self.now_s

    def first_s(self, options: Sequence[tuple[float, StageMap]], first_ranks: int) -> float:
        """Predicted seconds of a step on as many ranks as the run began with; those that left are like the first."""
        if first_ranks > len(self.limits):
            # ranks that left cannot be asked any more, so they are taken to be like the first
            limits = (*self.limits, *[self.limits[0]] * (first_ranks - len(self.limits)))
            links = grown(self.transfer_s, len(limits))
            first = _Comparison(self.costs, limits, self.current, self.microbatches, self.config, links)
            options = first.proposed(tuple(range(min(first_ranks, len(self.costs)))))
        return min([s for s, _ in options], default=self.now_s)

    def packed(self, allowed_s: float) -> ComparedMap | None:
        """The best map on the fewest ranks, fewer than those in use, whose step takes at most `allowed_s`."""
        fastest = sorted((r.speed for r in self.limits), reverse=True)
        work_s = sum(c.total_s for c in self.costs) * self.microbatches
        for size in range(1, len(self.current.used_ranks)):
            # a lower bound: not even perfect balance on the fastest ranks would do
            if work_s / sum(fastest[:size]) > allowed_s:
                continue
            try:
                packed = repack(
                    self.costs,
                    self.limits,
                    self.current,
                    microbatches=self.microbatches,
                    target_ranks=size,
                    transfer_s=self.transfer_s,
                )
            except PartitionError:
                continue
            if packed.makespan_s <= allowed_s:
                return packed
        return None

    def decision(self, move: bool, best_s: float, best: StageMap, reason: str) -> Decision:
        """The decision for `best`, whose step takes `best_s`."""
        return Decision(
            move=move,
            gains=self.now_s - best_s > self.config.min_gain * self.now_s,
            current=self.current,
            best=best,
            current_makespan_s=self.now_s,
            best_makespan_s=best_s,
            move_s=self.move_s(best),
            reason=reason,
        )


def _maps_of_policy(
    costs: Sequence[LayerCost],
    there: Sequence[RankLimits],
    local: StageMap,
    transfer_s: Transfers,
    *,
    microbatches: int,
    policy: Policy,
) -> list[StageMap]:
    """Maps that the policy proposes for ranks with the limits `there`; `local` is the map in force in their numbers."""
    known: dict[str, Any] = {"microbatches": microbatches, "transfer_s": transfer_s}
    if policy == "partition-by-parameters":
        return [partition_by_parameters(costs, there, microbatches=microbatches)]
    if policy == "partition":
        # also maps that are nearly as good and nearer to the one in force: less has to move
        near = [partition_near(costs, there, local, slack=slack, **known) for slack in (0.0, 0.01)]
        # how much of a link's time is hidden, the simulator knows: where all of it is, the even map is the best
        even = [partition_by_time(costs, there, microbatches=microbatches)] if np.any(transfer_s) else []
        return [partition_by_time(costs, there, **known), *near, *even]
    start = local
    if local.ranks != tuple(range(len(there))):
        # layers that run elsewhere, or not in order, have no boundary to shift yet
        start = partition_near(costs, there, local, slack=float(len(costs)), **known)
    load: Load = "time" if policy == "diffusion" else "parameters"
    maps = diffuse(costs, there, start, load=load, **known)
    if load == "parameters" or not np.any(transfer_s):
        return maps[-1:]
    # with links the most even loads need not be the fastest pace
    return [maps[-1], min(maps, key=lambda m: bottleneck_s(costs, m, there, transfer_s))]


def _in_stage_order(stage_map: StageMap) -> tuple[int, ...]:
    """Ranks in use, each where its first stage stands."""
    return tuple(dict.fromkeys(stage_map.ranks))
