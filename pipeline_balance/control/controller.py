"""Measure, decide, move only where it pays: the controller of an `ElasticPipeline`.

Shape legend: L layers, P ranks, M microbatches. It knows nothing of why loads change. What to do is worked out in
`decision` and `judge`, from figures that are equal on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline_balance.control.ahead import Ahead
from pipeline_balance.control.decide import (
    ControllerConfig,
    Decision,
    MoveCost,
    Policy,
    decide,
)
from pipeline_balance.control.learn import Judge
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import Imbalance, LayerCost, RankLimits, rank_loads_s
from prophet.errors import SpecError
from prophet.ranks.collective import Collective, Operation
from prophet.spec import digest

if TYPE_CHECKING:
    from pipeline_balance.pipeline.trainer import ElasticPipeline, Prepared, Rebuilt

__all__ = ["Controller", "ControllerConfig", "Decision", "DecisionMismatch", "MoveCost", "Overhead", "Policy", "decide"]


class DecisionMismatch(RuntimeError):
    """Ranks decided differently from what should be equal figures; the message names them."""


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
    taken as v times as long on a rank of speed 1. `judge` holds what was learnt so far.
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
        self.judge = Judge(self.limits, pipeline.microbatches, self.config)
        self.decisions: list[Decision] = []
        self.imbalance: Imbalance | None = None
        self._spent = {"total": 0.0, "measure": 0.0, "decide": 0.0, "move": 0.0}
        self._moves: list[Rebuilt] = []
        self._ahead: Ahead | None = None
        self._settled_at = 1
        self._refreshed = pipeline.refreshed
        if self.config.prepare_in_backward:
            pipeline.side_collective()
            pipeline.meter.max_samples = self.config.measure_steps * pipeline.microbatches
        pipeline.meter.enabled = self.judge.lookout.measuring

    def step(self, inputs: Tensor | None, target: Tensor | None) -> float | None:
        """One training step, and a decision where one is due. Returns what the pipeline's step returns."""
        if len(self.limits) != self.pipeline.ranks:
            raise SpecError(
                f"the group has {self.pipeline.ranks} ranks now, the controller was made for {len(self.limits)}: "
                f"attach again after the group has changed"
            )
        began = time.perf_counter()
        lookout = self.judge.lookout
        if self.pipeline.refreshed != self._refreshed:
            self._refreshed = self.pipeline.refreshed
            lookout.disturbed()
        self.pipeline.meter.enabled = lookout.measuring
        due = lookout.due
        # layers that have not gone backward since they came here have no times yet
        ahead = self.config.prepare_in_backward and lookout.step >= self._settled_at
        if due and ahead:
            self.pipeline.meter.on_backward = self._begin
        loss = self.pipeline.step(inputs, target)
        lookout.step += 1
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
        self.judge.settle(decision)
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
        self.judge.settle(decision)
        if decision.move:
            self._settled_at = self.judge.lookout.step + 1
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
        self.imbalance = Imbalance.of([x for x in rank_loads_s(costs, current, self.limits) if x > 0] or [0.0])
        decision = self.judge.look(costs, current)
        self._check_agreed(decision, collective)
        self.decisions.append(decision)
        return decision

    def _move(self, decision: Decision, costs: Sequence[LayerCost], prepared: Prepared | None) -> None:
        if not decision.move:
            return
        speeds = [r.speed for r in self.limits]
        durations = Durations.of_stages(costs, decision.best, speeds=speeds, transfer_s=self.config.transfer_s)
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
        """What this move took on the slowest rank; equal on all ranks."""
        self._moves.append(done)
        mine = torch.tensor(
            [done.seconds, float(done.sent_bytes + done.received_bytes)],
            dtype=torch.float64,
            device=self.pipeline.device,
        )
        every = self.pipeline.collective.all_gather(mine, op=Operation("timing a move")).cpu()
        self.judge.learn(float(every[:, 0].max()), float(every[:, 1].max()))

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
