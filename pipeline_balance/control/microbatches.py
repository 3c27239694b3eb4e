"""The number of microbatches, chosen again once other ranks run the stages.

Fewer ranks need fewer microbatches to be busy, and every microbatch costs something however small it is: kernels are
launched, small products are less efficient, messages have a latency. A layer's time is therefore taken as a line over
a microbatch's rows. Two numbers of microbatches are tried while training goes on, in the order A, B, B, A, so that a
steady drift of the machine shifts both alike. Each half of such a trial gives a line, and a gain is known to no more
than what the halves differ by.

Shape legend: L layers, P ranks, M microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipeline_balance.control.report import MicrobatchChoice
from pipeline_balance.maps.compare import predicted_makespan_s
from pipeline_balance.schedules.links import Transfers
from pipeline_balance.spec import LayerCost, RankLimits, StageMap, fits

_TIMES = ("forward_s", "backward_input_s", "backward_weight_s")
# A line is believed up to this times the larger microbatch that was tried, and down to the smaller one over this.
_REACH = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """What some steps with one number of microbatches have shown; equal on all ranks.

    Attributes:
        microbatches: M.
        costs: [L] of a microbatch.
        transfer_s: Of a message between stages, or between any two ranks [P, P].
        between_s: What the runtime takes between two actions.
    """

    microbatches: int
    costs: Sequence[LayerCost]
    transfer_s: Transfers = 0.0
    between_s: float = 0.0

    def step_s(self, stage_map: StageMap, limits: Sequence[RankLimits]) -> float:
        """Simulate the seconds of a step with this many microbatches.

        Args:
            stage_map: Which rank runs which layers.
            limits: [P] the ranks.
        """
        return predicted_makespan_s(
            self.costs,
            stage_map,
            limits,
            microbatches=self.microbatches,
            transfer_s=self.transfer_s,
            between_s=self.between_s,
        )


@dataclass(kw_only=True, slots=True)
class Trial:
    """Two numbers of microbatches, tried in turns: the one in force, and another once the first stretch is known.

    Attributes:
        stage_map: Which rank runs which layers, in all of the trial.
        limits: [P] the ranks.
        now: The number in force before.
        most: The largest number that may be chosen.
        rows: Of a replica's batch.
        other: The other number that is tried; 0 until it is known.
        stretches: What was tried so far.
    """

    stage_map: StageMap
    limits: Sequence[RankLimits]
    now: int
    most: int
    rows: int = 0
    other: int = 0
    stretches: list[Stretch] = field(default_factory=list)

    def go_on(self, rows: int) -> bool:
        """Find the other number to try, once the first stretch is known; False where there is none.

        Args:
            rows: Of a replica's batch.
        """
        self.rows = rows
        costs = self.stretches[0].costs
        # nothing is known yet of larger microbatches, so all that autograd keeps is taken to grow with the rows
        found = [n for n in self._numbers() if fits(_grown(costs, self.now, n), self.stage_map, self.limits, n)]
        fewer = [n for n in found if n < self.now]
        halved = [n for n in fewer if 2 * n <= self.now]
        # half as many tell enough, and do not fill the memory as fewer would
        self.other = max(halved, default=0) or min(fewer, default=0) or min(found, default=0)
        return self.other > 0

    @property
    def done(self) -> bool:
        """Whether all has been tried."""
        return len(self.stretches) == 4

    @property
    def microbatches(self) -> int:
        """The number that the coming steps are to have."""
        return self.other if len(self.stretches) in (1, 2) else self.now

    def choose(self, *, step: int, min_gain: float) -> MicrobatchChoice:
        """Choose the number with the shortest simulated step, once all has been tried.

        Args:
            step: Updates made so far.
            min_gain: The least relative gain that counts as more than noise.
        """
        a, b, c, d = self.stretches
        # each line goes through both numbers
        lines = ((a, b), (d, c))
        now_s = [line[0].step_s(self.stage_map, self.limits) for line in lines]
        least_s = min_gain * sum(now_s) / 2
        # by number: (seconds gained per step, by how much that may be wrong)
        known: dict[int, tuple[float, float]] = {}
        for n in self._numbers():
            if not self._reached(n):
                continue
            at = [_on_line(line, n) for line in lines]
            if all(fits(x.costs, self.stage_map, self.limits, n) for x in at):
                first, second = (s - x.step_s(self.stage_map, self.limits) for s, x in zip(now_s, at, strict=True))
                known[n] = (first + second) / 2, abs(first - second)
        sure = [n for n, (gain_s, error_s) in known.items() if gain_s > max(error_s, least_s)]
        best = max(sure or known, key=lambda n: known[n][0], default=self.now)
        gain_s, error_s = known.get(best, (0.0, 0.0))
        figures = f"gain per step {1e3 * gain_s:.1f} ms predicted, give or take {1e3 * error_s:.1f} ms"
        reason = f"{self.now} microbatches stay; the best other number is {best}: {figures}"
        if sure:
            reason = f"{best} microbatches in place of {self.now}; {figures}"
        after = best if sure else self.now
        return MicrobatchChoice(
            step=step,
            before=self.now,
            after=after,
            gain_s=gain_s,
            error_s=error_s,
            step_s=sum(now_s) / 2,
            reason=reason,
        )

    def _numbers(self) -> list[int]:
        """Other numbers of microbatches with equally many rows that keep all ranks in use busy."""
        least, most = min(len(self.stage_map.used_ranks), self.now), min(self.most, self.rows)
        return [n for n in range(least, most + 1) if n != self.now and self.rows % n == 0]

    def _reached(self, n: int) -> bool:
        tried = self.now, self.other
        return min(tried) <= _REACH * n and n <= _REACH * max(tried)


def _grown(costs: Sequence[LayerCost], before: int, after: int) -> list[LayerCost]:
    """The costs with activations of another number of microbatches, in proportion."""
    return [replace(cost, activation_bytes=-(-cost.activation_bytes * before // after)) for cost in costs]


def _on_line(tried: tuple[Stretch, Stretch], n: int) -> Stretch:
    """What `n` microbatches would show, on a line over the rows of one, which is 1 / M of a batch."""
    a, b = tried
    share = (1 / n - 1 / a.microbatches) / (1 / b.microbatches - 1 / a.microbatches)

    def on(x: Any, y: Any) -> Any:
        # exactly what was measured at both ends; noise in tiny layers may lead below zero further away
        return np.maximum(x * (1 - share) + y * share, 0.0)

    costs = []
    for x, y in zip(a.costs, b.costs, strict=True):
        found: dict[str, Any] = {name: float(on(getattr(x, name), getattr(y, name))) for name in _TIMES}
        found["activation_bytes"] = math.ceil(on(x.activation_bytes, y.activation_bytes))
        costs.append(replace(x, **found))
    # between two actions nothing depends on the rows
    between_s = (a.between_s + b.between_s) / 2
    transfer_s = on(np.asarray(a.transfer_s, dtype=np.float64), np.asarray(b.transfer_s, dtype=np.float64))
    return Stretch(microbatches=n, costs=costs, transfer_s=transfer_s, between_s=between_s)
