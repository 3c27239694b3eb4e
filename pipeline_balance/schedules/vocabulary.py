"""A vocabulary that is split over all ranks, as actions of a schedule (SlimPipe, Section 4.3).

Every rank has some rows of the embedding and of the head, so it has a part in both for every unit:

    E  looks up the unit's tokens among the rank's rows; stage 0 adds up what all ranks find, before its forward
    S  the head's sums over the rank's rows for every token, once the last stage has gone forward
    T  the head's gradients from the sums of all ranks: of its rows, and a part of the hidden states', which the last
       stage adds up before its backward
    G  the embedding's gradient of the rank's rows, once stage 0 has gone backward

All ranks run them in one order, as they exchange messages in them. S and T wait for all ranks, so the last stage would
wait between each forward and its backward. Therefore stages run one unit more ahead, as if the head were a stage
behind the last one.

Shape legend: S stages, P ranks, M microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline_balance.schedules.actions import Action, Kind, Schedule, ScheduleError, build
from pipeline_balance.schedules.named import MakeSchedule, schedule_for

# what actions take on paper, in forwards of a stage: where they stand among the others follows from it
_TAKEN = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "S": 0.3, "T": 0.6}
# lookups of this many units are there before stage 0 needs them
_AHEAD = 1


def schedule_with_head(
    choice: str | MakeSchedule, stage_ranks: Sequence[int], microbatches: int, *, split_backward: bool
) -> Schedule:
    """The schedule of `choice`, whose stages run one unit more ahead where it is a name; without what ranks share.

    Args:
        choice: As for `schedule_for`.
        stage_ranks: The rank of every stage [S].
        microbatches: M.
        split_backward: As for `schedule_for`.
    """
    ranks, stages = len(set(stage_ranks)), len(stage_ranks)
    if not isinstance(choice, str) or choice == "interleaved":
        return schedule_for(choice, stage_ranks, microbatches, split_backward=split_backward)
    # a stage for the head, on a rank that nobody is
    made = schedule_for(choice, (*stage_ranks, ranks), microbatches, split_backward=split_backward)
    return build(made.actions[:ranks], stages, microbatches)


def sharing(schedule: Schedule) -> Schedule:
    """The same schedule where all ranks share a vocabulary."""
    together = any(a.kind == "H" for row in schedule.actions for a in row)
    rows = shared_rows(schedule.actions, schedule.stages, together=together)
    return build(rows, schedule.stages, schedule.microbatches, schedule.slices)


def shared_rows(rows: Sequence[Sequence[Action]], stages: int, *, together: bool = False) -> list[list[Action]]:
    """Every rank's actions with those that ranks share, by running all of them on paper.

    Args:
        rows: Actions by rank [P]; forwards alone for an evaluation.
        stages: S.
        together: Whether all ranks run their k-th action at the same time, as they help each other in it.

    Raises:
        ScheduleError: Actions wait for each other in a circle.
    """
    paper = _Paper(rows, stages)
    if together:
        paper.in_slots()
    else:
        paper.in_time()
    return paper.out


class _Paper:
    """All ranks on paper: what each has done, and the one order in which they share."""

    def __init__(self, rows: Sequence[Sequence[Action]], stages: int) -> None:
        self.rows, self.stages = [list(row) for row in rows], stages
        self.out: list[list[Action]] = [[] for _ in rows]
        self.at, self.shared = [0] * len(rows), [0] * len(rows)
        self.free = [0.0] * len(rows)
        # by kind, stage and unit; -1 is the stage of what is shared, once all ranks have run it
        self.end: dict[tuple[str, int, int], float] = {}
        self.parts: dict[tuple[str, int], list[float]] = {}
        # the one order: whoever is first to run something that is ready decides
        self.order: list[tuple[Kind, int]] = []
        units = [a.microbatch for row in self.rows for a in row if (a.kind, a.stage) == ("F", 0)]
        self.coming: dict[Kind, list[int]] = {"E": list(reversed(units)), "S": [], "T": [], "G": []}
        # units whose lookup has its place in the order, and units that stage 0 has begun
        self.looked_up = self.begun = 0

    # --- what may run ---

    def _pass_ready(self, action: Action) -> float | None:
        """When a pass of a stage has its input; None while that is not known."""
        s, m, last = action.stage, action.microbatch, self.stages - 1
        if action.kind in "HW":
            return 0.0
        if action.kind == "F":
            return self.end.get(("E", -1, m) if s == 0 else ("F", s - 1, m))
        if s == last:
            return self.end.get(("T", -1, m))
        return self.end.get(("B", s + 1, m), self.end.get(("I", s + 1, m)))

    def _shared_ready(self, rank: int) -> tuple[float, Kind, int] | None:
        """The next thing that a rank shares, and when it has what it needs."""
        if self.shared[rank] < len(self.order):
            kind, unit = self.order[self.shared[rank]]
            return self._since(kind, unit), kind, unit
        found: list[tuple[float, Kind, int]] = []
        for kind, units in self.coming.items():
            if units and (kind != "E" or self.looked_up <= self.begun + _AHEAD):
                found.append((self._since(kind, units[-1]), kind, units[-1]))
        # kinds in their order decide where times are equal
        return min(found, key=lambda one: one[0]) if found else None

    def _since(self, kind: Kind, unit: int) -> float:
        if kind == "S":
            return self.end["F", self.stages - 1, unit]
        if kind == "T":
            return self.end["S", -1, unit]
        if kind == "G":
            return self.end.get(("B", 0, unit), self.end.get(("I", 0, unit), 0.0))
        return 0.0

    # --- running ---

    def _run_pass(self, rank: int, begin: float) -> None:
        action = self.rows[rank][self.at[rank]]
        s, m, kind = action.stage, action.microbatch, action.kind
        self.at[rank] += 1
        self.out[rank].append(action)
        self.free[rank] = self.end[kind, s, m] = begin + _TAKEN.get(kind, 0.0)
        if kind == "F":
            self.begun += s == 0
            if s == self.stages - 1:
                self.coming["S"].insert(0, m)
        if kind in "BI" and s == 0:
            self.coming["G"].insert(0, m)

    def _run_shared(self, rank: int, begin: float, kind: Kind, unit: int) -> None:
        if self.shared[rank] == len(self.order):
            self.order.append((kind, unit))
            self.coming[kind].pop()
            self.looked_up += kind == "E"
        self.shared[rank] += 1
        self.out[rank].append(Action(self.rows[rank][0].stage, kind, unit))
        self.free[rank] = begin + _TAKEN.get(kind, 0.0)
        parts = self.parts.setdefault((kind, unit), [])
        parts.append(self.free[rank])
        if len(parts) == len(self.rows):
            self.end[kind, -1, unit] = max(parts)
            if kind == "S":
                self.coming["T"].insert(0, unit)

    def in_time(self) -> None:
        """Run what can begin first, of all ranks; what is shared before passes."""
        while True:
            best: tuple[float, int, int] | None = None
            for rank, free in enumerate(self.free):
                shared = self._shared_ready(rank)
                if shared is not None:
                    choice = (max(free, shared[0]), 0, rank)
                    best = min(best, choice) if best is not None else choice
                if self.at[rank] < len(self.rows[rank]):
                    ready = self._pass_ready(self.rows[rank][self.at[rank]])
                    if ready is not None:
                        choice = (max(free, ready), 1, rank)
                        best = min(best, choice) if best is not None else choice
            if best is None:
                break
            begin, passes, rank = best
            if passes:
                self._run_pass(rank, begin)
            else:
                again = self._shared_ready(rank)
                assert again is not None
                self._run_shared(rank, begin, *again[1:])
        self._check_done()

    def in_slots(self) -> None:
        """Run slot after slot on all ranks at once, with all that can be shared between two of them."""
        for slot in range(max(map(len, self.rows))):
            self._share_all()
            for rank, row in enumerate(self.rows):
                if slot < len(row):
                    if self._pass_ready(row[slot]) is None:
                        raise ScheduleError(f"{row[slot]} waits for a result that comes later")
                    self._run_pass(rank, float(slot))
        self._share_all()
        self._check_done()

    def _share_all(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.rows)):
                shared = self._shared_ready(rank)
                if shared is not None:
                    self._run_shared(rank, self.free[rank], *shared[1:])
                    moved = True

    def _check_done(self) -> None:
        waiting = [str(row[at]) for row, at in zip(self.rows, self.at, strict=True) if at < len(row)]
        if waiting:
            raise ScheduleError(f"the actions wait for each other: {', '.join(waiting)}")
