"""When to change the stage map: measure, decide, move only where it pays. The controller knows nothing of why loads
change.

Shape legend: L layers, P ranks, M microbatches. `decide` is a function from values to values; `Controller` runs it on
an `ElasticPipeline` at an interval, or after every step where loads change that fast. A map is changed only if the
predicted gain over the steps until the next decision exceeds what the move is expected to cost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from pipeline_balance.ahead import Ahead
from pipeline_balance.choose import Choice, predicted_makespan_s
from pipeline_balance.diffusion import diffuse
from pipeline_balance.partition import explain_memory, partition_by_parameters, partition_by_time, partition_near
from pipeline_balance.repack import repack
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import (
    Imbalance,
    LayerCost,
    PartitionError,
    RankLimits,
    StageMap,
    fits,
    rank_loads_s,
)
from prophet.comm import Collective, Operation
from prophet.spec import SpecError, digest

if TYPE_CHECKING:
    from pipeline_balance.runtime import ElasticPipeline, Prepared, Rebuilt

Policy = Literal["partition", "partition-by-parameters", "diffusion", "diffusion-by-parameters"]


class DecisionMismatch(RuntimeError):
    """Ranks decided differently from what should be equal figures; the message names them."""


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

    `min_gain` is the least relative gain that is taken for more than noise. `repack_slowdown` allows fewer ranks where
    the step becomes longer by at most this fraction of the best one on all ranks (None: never). `transfer_s` is what an
    activation takes between two stages. `horizon_steps` is for how many steps a change is expected to pay (None: until
    the next decision); where every step is looked at, loads last longer than that. `prepare_in_backward` measures,
    decides and prepares the move beside the backward pass before it, by what is known when that begins.
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

    def __post_init__(self) -> None:
        if self.every_steps < 1 or not 1 <= self.measure_steps <= self.every_steps:
            raise SpecError(f"need 1 <= measure_steps <= every_steps, got {self.measure_steps} and {self.every_steps}")
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
        # Ranks that were given up are taken back only when those in use no longer keep up, else the two rules would
        # undo each other.
        on_used = proposed(_in_stage_order(current))
        if on_used and min(s for s, _ in on_used) <= allowed_s:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """Seconds this rank spent, training included, and the fractions that balancing took of it."""

    total_s: float
    measure_s: float
    decide_s: float
    move_s: float
    rebalances: int
    moved_bytes: int

    @property
    def fraction(self) -> float:
        """Of all the time, what measuring, deciding and moving took."""
        spent = self.measure_s + self.decide_s + self.move_s
        return spent / self.total_s if self.total_s > 0 else 0.0


class Controller:
    """Runs the steps of an `ElasticPipeline` and keeps its stages balanced. All ranks drive theirs in step.

    `limits` [P] are the ranks' memory and speed, equal on all ranks. Layer times measured on a rank of speed v are
    taken as v times as long on a rank of speed 1. `trust` from 0 to 1 says how much of the predicted gains was still
    there at the next decision.
    """

    def __init__(
        self,
        pipeline: ElasticPipeline,
        limits: Sequence[RankLimits] | None = None,
        config: ControllerConfig | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.limits = tuple(limits) if limits is not None else RankLimits.uniform(pipeline.ranks)
        if len(self.limits) != pipeline.ranks:
            raise SpecError(f"limits needs one entry per rank ({pipeline.ranks}), got {len(self.limits)}")
        self.config = config or ControllerConfig()
        self.move_cost = self.config.move_cost
        self.decisions: list[Decision] = []
        self.imbalance: Imbalance | None = None
        self._step = 0
        self._spent = {"total": 0.0, "measure": 0.0, "decide": 0.0, "move": 0.0}
        self._moves: list[Rebuilt] = []
        self._ahead: Ahead | None = None
        self._settled_at = 1
        self._last_move: Decision | None = None
        self.trust = 1.0
        self._missed_s = 0.0
        if self.config.prepare_in_backward:
            pipeline.side_collective()
            pipeline.meter.max_samples = self.config.measure_steps * pipeline.microbatches
        pipeline.meter.enabled = self._measuring()

    def _measuring(self) -> bool:
        until = self.config.every_steps - self._step % self.config.every_steps
        return until <= self.config.measure_steps + int(self.config.prepare_in_backward)

    def step(self, inputs: Tensor | None, target: Tensor | None) -> float | None:
        """One training step, and a decision where one is due. Returns what the pipeline's step returns."""
        began = time.perf_counter()
        self.pipeline.meter.enabled = self._measuring()
        due = (self._step + 1) % self.config.every_steps == 0
        # layers that have not gone backward since they came here have no times yet
        ahead = self.config.prepare_in_backward and self._step >= self._settled_at
        if due and ahead:
            self.pipeline.meter.on_backward = self._begin
        loss = self.pipeline.step(inputs, target)
        self._step += 1
        if due and ahead:
            self.conclude()
        elif due and not self.config.prepare_in_backward:
            self.rebalance()
        self._spent["total"] += time.perf_counter() - began
        return loss

    def rebalance(self) -> Decision:
        """Measure, decide and, where it pays, move; collective over all ranks."""
        t0 = time.perf_counter()
        costs = self.at_unit_speed(self.pipeline.measure())
        t1 = time.perf_counter()
        decision = self.decide_from(costs, self.pipeline.collective)
        t2 = time.perf_counter()
        self._move(decision, costs, None)
        self.pipeline.meter.reset()
        t3 = time.perf_counter()
        for name, seconds in (("measure", t1 - t0), ("decide", t2 - t1), ("move", t3 - t2)):
            self._spent[name] += seconds
        return decision

    def _begin(self) -> None:
        """Start to work out the next decision beside the backward pass that begins now."""
        began = time.perf_counter()
        self._ahead = Ahead(self, self.pipeline.local_costs())
        self._spent["measure"] += time.perf_counter() - began

    def conclude(self) -> Decision:
        """Take up what was prepared beside the backward pass; collective over all ranks, after the step."""
        if self._ahead is None:  # a rank that had nothing to do in backward
            self.pipeline.meter.on_backward = None
            self._begin()
        ahead, self._ahead = self._ahead, None
        assert ahead is not None
        t0 = time.perf_counter()
        decision = ahead.result(self.pipeline.timeout_s)
        t1 = time.perf_counter()
        self._move(decision, ahead.costs, ahead.prepared)
        if decision.move:
            self._settled_at = self._step + 1
        t2 = time.perf_counter()
        self._spent["decide"] += t1 - t0
        self._spent["move"] += t2 - t1
        return decision

    def at_unit_speed(self, costs: Sequence[LayerCost]) -> list[LayerCost]:
        """Measured costs as they would be on a rank of speed 1."""
        home = self.pipeline.stage_map.assignment()
        return [_scaled(c, self.limits[home[i]].speed) for i, c in enumerate(costs)]

    def decide_from(self, costs: Sequence[LayerCost], collective: Collective) -> Decision:
        """A decision that all ranks share, noted but not carried out; collective over `collective`."""
        current = self.pipeline.stage_map
        self._look_back(costs)
        self.imbalance = Imbalance.of([x for x in rank_loads_s(costs, current, self.limits) if x > 0] or [0.0])
        decision = decide(
            costs,
            self.limits,
            current,
            microbatches=self.pipeline.microbatches,
            horizon_steps=max(1, round(self.trust * (self.config.horizon_steps or self.config.every_steps))),
            config=replace(self.config, move_cost=self.move_cost),
            missed_s=self._missed_s,
        )
        waits = not decision.move and decision.gain_s > self.config.min_gain * decision.current_makespan_s
        self._missed_s = self._missed_s + decision.gain_s * self.config.every_steps if waits else 0.0
        self._check_agreed(decision, collective)
        self.decisions.append(decision)
        return decision

    def _look_back(self, costs: Sequence[LayerCost]) -> None:
        """See what is left of the last move's gain now that loads are others: gains that do not last count for fewer
        steps. `costs` are equal on all ranks, and so is what follows.
        """
        last, self._last_move = self._last_move, None
        if last is None or not last.gain_s > 0:
            return
        before_s, after_s = (
            predicted_makespan_s(
                costs,
                stage_map,
                self.limits,
                microbatches=self.pipeline.microbatches,
                transfer_s=self.config.transfer_s,
            )
            for stage_map in (last.current, last.best)
        )
        kept = min(max((before_s - after_s) / last.gain_s, 0.0), 1.0)
        self.trust = (self.trust + kept) / 2

    def _move(self, decision: Decision, costs: Sequence[LayerCost], prepared: Prepared | None) -> None:
        if not decision.move:
            return
        speeds = [r.speed for r in self.limits]
        durations = Durations.of_stages(costs, decision.best, speeds=speeds, transfer_s=self.config.transfer_s)
        self._last_move = decision
        self.pipeline.drop_gradients()
        self._learn(self.pipeline.rebuild(decision.best, durations=durations, prepared=prepared))

    def _check_agreed(self, decision: Decision, collective: Collective) -> None:
        chosen = decision.best if decision.move else decision.current
        array = torch.tensor([*chosen.boundaries, *chosen.ranks], dtype=torch.int64).numpy()
        mine = torch.tensor([digest(array)], dtype=torch.int64, device=self.pipeline.device)
        every = collective.all_gather(mine, op=Operation("comparing decisions")).cpu().reshape(-1).tolist()
        differ = [r for r, d in enumerate(every) if d != every[0]]
        if differ:
            raise DecisionMismatch(f"ranks {differ} chose another stage map than rank 0 did")

    def _learn(self, done: Rebuilt) -> None:
        """Take the slowest rank's time of this move for the fixed part of the next; equal on all ranks."""
        self._moves.append(done)
        mine = torch.tensor(
            [done.seconds, float(done.sent_bytes + done.received_bytes)],
            dtype=torch.float64,
            device=self.pipeline.device,
        )
        every = self.pipeline.collective.all_gather(mine, op=Operation("timing a move")).cpu()
        seconds, busiest = float(every[:, 0].max()), float(every[:, 1].max())
        fixed = max(seconds - busiest / self.move_cost.bytes_per_s, 0.0)
        self.move_cost = replace(self.move_cost, fixed_s=(self.move_cost.fixed_s + fixed) / 2)

    def overhead(self) -> Overhead:
        """What balancing has taken so far on this rank."""
        return Overhead(
            total_s=self._spent["total"],
            measure_s=self._spent["measure"],
            decide_s=self._spent["decide"],
            move_s=self._spent["move"],
            rebalances=len(self._moves),
            moved_bytes=sum(m.sent_bytes for m in self._moves),
        )


def _scaled(cost: LayerCost, speed: float) -> LayerCost:
    return replace(
        cost,
        forward_s=cost.forward_s * speed,
        backward_input_s=cost.backward_input_s * speed,
        backward_weight_s=cost.backward_weight_s * speed,
    )
