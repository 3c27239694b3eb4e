"""A schedule for any map of stages to ranks, made by running the pipeline on paper and taking what is ready.

Shape legend: S stages, P ranks, M microbatches. The maps that layers moved one by one leave behind (stages 0, 0, 1, 0,
1 on two ranks) fit none of the named schedules. Rule of a free rank: a backward that is ready; else a forward, as long
as its stage holds fewer than min(M, S - stage) microbatches; else, with a split backward, a weight gradient. On stage k
on rank k with even durations this is 1F1B. With uneven ones it may be better or worse than 1F1B, and an order that
suits exact durations suffers when they change, so 1F1B is kept unless it is clearly longer.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from pipeline_balance.schedules.actions import Action, Kind, Schedule, ScheduleError, build, check_shape
from pipeline_balance.schedules.classic import one_f_one_b
from pipeline_balance.schedules.simulate import Durations, simulate
from pipeline_balance.spec import in_flight
from prophet.spec import FloatArray

CLEARLY = 0.05
"""By how much 1F1B must be longer, relative to the order made for the durations at hand."""


def flexible(
    stage_ranks: Sequence[int],
    microbatches: int,
    *,
    durations: Durations | None = None,
    split_backward: bool = False,
) -> Schedule:
    """Schedule S = len(stage_ranks) stages on the ranks they name.

    A stage holds at most min(M, S - stage) microbatches, which is what the partition's memory rule reckons with.

    Args:
        stage_ranks: The rank of every stage [S].
        microbatches: M.
        durations: [S] figures that steer which operation is ready first; None: every part takes one second.
        split_backward: Backwards for the input and for the weights are two actions.

    Raises:
        ScheduleError: If a rank below the highest has no stage: torch's runtime cannot drive one.
    """
    stages = len(stage_ranks)
    ranks = max(stage_ranks, default=-1) + 1
    check_shape(ranks, microbatches)
    idle = sorted(set(range(ranks)) - set(stage_ranks))
    if idle or min(stage_ranks) < 0:
        raise ScheduleError(f"stage ranks {list(stage_ranks)} must cover 0..{ranks - 1}; without a stage: {idle}")
    durations = durations or Durations.uniform(stages)
    made: list[tuple[float, int, Schedule]] = []
    # Carrying one microbatch through all of a rank's stages suits adjacent stages, finishing a round in one
    # stage first suits interleaved ones. A map may hold both: every order is run, the shortest is taken.
    # With one stage per rank there is nothing to order.
    one_each = len(set(stage_ranks)) == stages
    if tuple(stage_ranks) == tuple(range(stages)) and not split_backward:
        schedule = one_f_one_b(stages, microbatches)
        # made to look shorter by CLEARLY, so that it wins unless another is clearly shorter
        made.append((simulate(schedule, durations).makespan_s / (1.0 + CLEARLY), 0, schedule))
    for forward_sign, backward_sign in [(1, -1)] if one_each else itertools.product((-1, 1), (1, -1)):
        run = _Run(tuple(stage_ranks), microbatches, durations, split_backward, forward_sign, backward_sign)
        schedule = build(run.rows(), stages, microbatches)
        made.append((simulate(schedule, durations).makespan_s, len(made), schedule))
    # of equal times the one made first
    return min(made)[2]


class _Run:
    """The pipeline on paper: what is ready on which rank, and when every rank is free."""

    def __init__(
        self,
        home: tuple[int, ...],
        microbatches: int,
        durations: Durations,
        split: bool,
        forward_sign: int,
        backward_sign: int,
    ) -> None:
        self.home = home
        self.stages = len(home)
        self.durations = durations
        self.split = split
        self.forward_sign = forward_sign
        self.backward_sign = backward_sign
        self.ranks = max(home) + 1
        # one figure per stage, also where a part is [S, M]
        parts = (durations.forward_s, durations.input_s, durations.weight_s)
        forward, input_, weight = (part.mean(axis=1) if part.ndim > 1 else part for part in parts)
        means = {"F": forward, "I": input_, "W": weight, "B": input_ + weight}
        self.seconds = {kind: values.tolist() for kind, values in means.items()}
        self.cap = [in_flight(s, self.stages, microbatches) for s in range(self.stages)]
        self.held = [0] * self.stages
        self.ready: list[set[Action]] = [set() for _ in range(self.ranks)]
        self.ready[home[0]].update(Action(0, "F", m) for m in range(microbatches))

    def _priority(self, action: Action) -> tuple[int, int, int, int] | None:
        """Smaller goes first; None if the action may not run now."""
        # microbatches advance in rounds of P, as in interleaved 1F1B, so that no stage runs far ahead
        turn = action.microbatch // self.ranks
        if action.kind in ("I", "B"):
            return (0, turn, self.backward_sign * action.stage, action.microbatch)
        if action.kind == "F":
            if self.held[action.stage] >= self.cap[action.stage]:
                return None
            return (1, turn, self.forward_sign * action.stage, action.microbatch)
        # weight gradients wait for nobody and nobody waits for them: they fill gaps
        return (2, turn, -action.stage, action.microbatch)

    def _follow(self, action: Action) -> list[tuple[float, Action]]:
        """Actions that `action`'s end makes possible, each with the seconds its input travels."""
        s, m, d = action.stage, action.microbatch, self.durations
        backward: Kind = "I" if self.split else "B"
        after: list[tuple[float, Action]] = []
        if action.kind == "F":
            if s + 1 < self.stages:
                after.append((self._link(d.forward_transfer_s, s, s + 1), Action(s + 1, "F", m)))
            else:
                after.append((0.0, Action(s, backward, m)))
        elif action.kind == backward:
            if s > 0:
                link = self._link(d.backward_transfer_s, s - 1, s)
                after.append((link, Action(s - 1, backward, m)))
            if self.split:
                after.append((0.0, Action(s, "W", m)))
        return after

    def _link(self, seconds: FloatArray, lower: int, upper: int) -> float:
        same = self.home[lower] == self.home[upper]
        return 0.0 if same or len(seconds) == 0 else float(seconds[lower])

    def rows(self) -> list[list[Action]]:
        """Every rank's actions in the order in which it takes them, [P]."""
        rows: list[list[Action]] = [[] for _ in range(self.ranks)]
        free = [True] * self.ranks
        # (time, order, rank that becomes free or -1, action that becomes ready or ended)
        events: list[tuple[float, int, int, Action]] = []
        order = 0
        now = 0.0
        while True:
            for rank in range(self.ranks):
                action = self._choose(rank) if free[rank] else None
                if action is None:
                    continue
                self.ready[rank].discard(action)
                rows[rank].append(action)
                if action.kind == "F":
                    self.held[action.stage] += 1
                free[rank] = False
                heapq.heappush(events, (now + self.seconds[action.kind][action.stage], order, rank, action))
                order += 1
            if not events:
                return rows
            now = events[0][0]
            # all that ends at this moment, before any rank chooses
            while events and events[0][0] <= now:
                _, _, rank, action = heapq.heappop(events)
                if rank < 0:
                    self.ready[self.home[action.stage]].add(action)
                    continue
                free[rank] = True
                if action.kind in ("B", "W"):
                    self.held[action.stage] -= 1
                for travel_s, follower in self._follow(action):
                    heapq.heappush(events, (now + travel_s, order, -1, follower))
                    order += 1

    def _choose(self, rank: int) -> Action | None:
        allowed = [(p, a) for a in self.ready[rank] if (p := self._priority(a)) is not None]
        return min(allowed)[1] if allowed else None
