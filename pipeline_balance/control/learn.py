"""What a controller learns: when the next decision is due, how long gains last, what moves cost.

Shape legend: L layers, P ranks. No clock and no process group: ranks that are given the same figures agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline_balance.control.decide import ControllerConfig, Decision, MoveCost, decide
from pipeline_balance.maps.compare import predicted_makespan_s
from pipeline_balance.maps.partition import partition_by_time
from pipeline_balance.schedules.links import Transfers
from pipeline_balance.spec import LayerCost, RankLimits, StageMap
from prophet.spec import FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveTime:
    """What a move took.

    Attributes:
        seconds: On the slowest rank.
        busiest_bytes: Sent and received on the busiest rank in that time.
        early: The share of all bytes that travelled beside a step.
    """

    seconds: float
    busiest_bytes: float
    early: float = 0.0


class DecisionTimer:
    """Counts steps; says which are measured, and with which a decision is due.

    Attributes:
        step: How many there were.
        interval_steps: How many steps the next decision comes after the last one.
        due_at: How many there are with the one that ends with it.
        timed_from: In the steps before this one some layer has no times yet, which a decision beside them would need.
    """

    def __init__(self, config: ControllerConfig) -> None:
        self.config = config
        self.step = 0
        self.interval_steps = config.every_steps
        self.due_at = config.every_steps
        self.timed_from = 0
        # a decision beside a step knows the times of the steps before
        self._beside = int(config.prepare_in_backward)

    @property
    def measuring(self) -> bool:
        """Whether the coming step is to be measured."""
        left = self.due_at - self.step - self._beside
        # where the decision comes with this step, only the next one might need its times, or one that had to wait
        needed = left > 0 or self.config.every_steps == self.config.measure_steps or not self._timed
        return left <= self.config.measure_steps and needed

    @property
    def due(self) -> bool:
        """Whether the coming step has a decision: beside it, or at its end."""
        return self.step + 1 >= self.due_at and self._timed

    @property
    def _timed(self) -> bool:
        return not self._beside or self.step >= self.timed_from

    def loads_changed(self, *, known: bool = False) -> None:
        """Decide once the loads, which have changed for certain, have been measured; where they are `known`, now."""
        self.interval_steps = self.config.every_steps
        self.due_at = min(self.due_at, self.step + (1 if known else self.config.measure_steps + self._beside))

    def decided(self, *, quiet: bool) -> None:
        """Set when the next decision is due, after one that was made; `quiet`: it found nothing to gain."""
        most = self.config.max_every_steps or self.config.every_steps
        self.interval_steps = min(2 * self.interval_steps, most) if quiet else self.config.every_steps
        self.due_at = self.step + self.interval_steps


class Learner:
    """Decides with what earlier decisions and moves have taught.

    Args:
        limits: [P] the ranks' memory and speed.
        microbatches: M, times the slices of each.
        config: Which moves pay.
        first_ranks: How many ranks the run began with.

    Attributes:
        trust: How much of a predicted gain was still there at the next decision, from 0 to 1.
        missed_s: What staying has lost since the last time there was nothing to gain.
        transfer_s: Seconds of a message between stages, by ranks [P, P] once links have been measured.
    """

    def __init__(
        self, limits: Sequence[RankLimits], microbatches: int, config: ControllerConfig, first_ranks: int = 0
    ) -> None:
        self.limits = tuple(limits)
        self.microbatches = microbatches
        self.first_ranks = first_ranks
        self.config = config
        self.timer = DecisionTimer(config)
        self.move_cost: MoveCost = config.move_cost
        # a horizon that the user gives is believed until gains turn out differently
        self.trust = 1.0 if config.horizon_steps is not None else 0.5
        self.missed_s = 0.0
        self.transfer_s: Transfers = config.transfer_s
        self._links_s: FloatArray | None = None
        self._last: Decision | None = None
        # the search is compiled when it is first called: not in the middle of a step
        partition_by_time([LayerCost(forward_s=1.0)], RankLimits.uniform(1), microbatches=1)

    def count(self, units: int) -> None:
        """Go on with another number of units, microbatches times the slices of each; see `microbatches`.

        A message is of one unit. So links take as much longer as units are larger, until they are measured again.
        """
        if units == self.microbatches:
            return
        if self._links_s is not None:
            grown = self.microbatches / units
            self._links_s, self.transfer_s = self._links_s * grown, np.asarray(self.transfer_s) * grown
        # a gain in other units would seem to have come or gone with the loads
        self.microbatches, self._last = units, None

    def learn_links(self, transfer_s: FloatArray) -> None:
        """Take over what messages take between ranks, [P, P]; NaN where none was measured now.

        A link that was measured before is taken to be as it was, any other like the typical one.
        """
        measured = ~np.isnan(transfer_s)
        if not measured.any():
            return
        known = self._links_s if self._links_s is not None else transfer_s
        self._links_s = known = np.where(measured, transfer_s, known)
        self.transfer_s = np.where(np.isnan(known), np.nanmedian(known), known)

    def decide(self, costs: Sequence[LayerCost], current: StageMap) -> Decision:
        """Decide for these costs. May run beside a step; `learn` from it before the next one."""
        self._learn_trust(costs)
        decision = decide(
            costs,
            self.limits,
            current,
            microbatches=self.microbatches,
            horizon_steps=self.lasting_steps(),
            config=replace(self.config, move_cost=self.move_cost),
            missed_s=self.missed_s,
            first_ranks=self.first_ranks,
            transfer_s=self.transfer_s,
        )
        waits = decision.gains and not decision.move
        self.missed_s = self.missed_s + decision.gain_s * self.timer.interval_steps if waits else 0.0
        self._last = decision if decision.gains else None
        return decision

    def learn(self, decision: Decision, move: MoveTime | None = None) -> None:
        """Learn from a decision that has been carried out, between two steps; `move` is what that took, None without a
        move.

        The next decision is due later where this one found nothing to gain.
        """
        if move is not None:
            # what the bytes do not explain of a move's time is the next one's fixed part
            fixed_s = max(move.seconds - move.busiest_bytes / self.move_cost.bytes_per_s, 0.0)
            self.move_cost = replace(self.move_cost, fixed_s=(self.move_cost.fixed_s + fixed_s) / 2)
        self.timer.decided(quiet=not decision.gains and not decision.move)

    def lasting_steps(self) -> int:
        """Return for how many steps a gain counts that loses all but `trust` of itself from one decision to the
        next.
        """
        interval = self.timer.interval_steps
        most = self.config.horizon_steps or 4 * self.config.every_steps
        decisions = math.ceil(most / interval)
        # a geometric series, cut off at the horizon
        return max(1, min(most, round(interval * sum(self.trust**n for n in range(1, decisions + 1)))))

    def _learn_trust(self, costs: Sequence[LayerCost]) -> None:
        """See what is left of the last gain, taken or not, now that loads are others."""
        last, self._last = self._last, None
        if last is None:
            return
        before_s, after_s = (
            predicted_makespan_s(
                costs, stage_map, self.limits, microbatches=self.microbatches, transfer_s=self.transfer_s
            )
            for stage_map in (last.current, last.best)
        )
        # by the new costs on both maps: what a move not made would save now counts the same
        kept = min(max((before_s - after_s) / last.gain_s, 0.0), 1.0)
        self.trust = (self.trust + kept) / 2


def without_frozen(costs: Sequence[LayerCost], before: Sequence[bool], now: Sequence[bool]) -> list[LayerCost] | None:
    """Work out what layers cost after some were frozen, before anything was measured of it.

    A frozen layer computes no gradient of its weights, and no layer computes one of its input if none below it trains.
    What autograd keeps of a layer is left as it was where any gradient passes.

    Args:
        costs: [L] from before.
        before: [L] whether any parameter of a layer trained when they were measured.
        now: [L] whether one trains now.

    Returns:
        [L] costs; None where a layer trains that did not, whose gradients were never timed.
    """
    if any(trains and not trained for trains, trained in zip(now, before, strict=True)):
        return None
    found = []
    for layer, (cost, trains) in enumerate(zip(costs, now, strict=True)):
        left = cost
        if not trains:
            left = replace(left, backward_weight_s=0.0, all_reduce_s=0.0, gradient_bytes=0, optimizer_bytes=0)
        if not any(now[:layer]):
            left = replace(left, backward_input_s=0.0)
        if not any(now[: layer + 1]):
            left = replace(left, activation_bytes=0)
        found.append(left)
    return found
