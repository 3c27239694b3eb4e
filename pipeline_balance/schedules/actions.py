"""A pipeline schedule as a value: what every rank computes, in order, printable and read back.

Shape legend: S stages, P ranks, M microbatches. An action prints as stage, kind, microbatch (`2F0`), the notation of
`torch.distributed.pipelining`, so a printed schedule can be handed to torch's runtime. Kinds: F forward, I backward for
the input only, W backward for the weights only, B both at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, cast, get_args

from prophet.errors import SpecError

Kind = Literal["F", "I", "W", "B"]
_ACTION = re.compile(r"(\d+)([FIWB])(\d+)")


class ScheduleError(SpecError):
    """A schedule misses or repeats work, or waits for itself; the message names the actions."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One piece of computation: `kind` of microbatch `microbatch` in stage `stage`."""

    stage: int
    kind: Kind
    microbatch: int

    def __post_init__(self) -> None:
        if self.stage < 0 or self.microbatch < 0 or self.kind not in get_args(Kind):
            raise ScheduleError(f"an action needs a stage, one of F, I, W, B, and a microbatch, got {self!r}")

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reverse of `str`; raises `ScheduleError` on anything else."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(f"an action reads like 2F0 (stage, F, I, W or B, microbatch), got {text!r}")
        return cls(int(match[1]), cast(Kind, match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Schedule:
    """Every rank's actions in order, [P][...], and how many stages and microbatches they are of.

    Valid when built: every stage runs on one rank; every microbatch passes F once and either B once, or I and then W
    once. Whether the order can run at all is what `simulate` finds out.
    """

    actions: tuple[tuple[Action, ...], ...]
    stages: int
    microbatches: int

    def __post_init__(self) -> None:
        if min(len(self.actions), self.stages, self.microbatches) < 1:
            got = f"{len(self.actions)}, {self.stages} and {self.microbatches}"
            raise ScheduleError(f"a schedule needs ranks, stages and microbatches, got {got}")
        home: dict[int, int] = {}
        seen: set[Action] = set()
        for rank, row in enumerate(self.actions):
            for action in row:
                self._check_action(action, rank, home, seen)
                seen.add(action)
        self._check_complete(seen)

    def _check_action(self, action: Action, rank: int, home: dict[int, int], seen: set[Action]) -> None:
        if action.stage >= self.stages or action.microbatch >= self.microbatches:
            raise ScheduleError(f"{action} is outside {self.stages} stages x {self.microbatches} microbatches")
        if home.setdefault(action.stage, rank) != rank:
            raise ScheduleError(f"stage {action.stage} appears on ranks {home[action.stage]} and {rank}")
        if action in seen:
            raise ScheduleError(f"{action} appears twice")
        needs: dict[str, Kind] = {"I": "F", "B": "F", "W": "I"}
        if action.kind in needs and Action(action.stage, needs[action.kind], action.microbatch) not in seen:
            raise ScheduleError(f"{action} comes before {needs[action.kind]} of the same microbatch")

    def _check_complete(self, seen: set[Action]) -> None:
        for s, m in product(range(self.stages), range(self.microbatches)):
            kinds = "".join(k for k in get_args(Kind) if Action(s, k, m) in seen)
            if kinds not in ("FB", "FIW"):
                said = kinds or "nothing"
                raise ScheduleError(f"microbatch {m} in stage {s} runs {said}, expected F and B, or F, I and W")

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Rank of every stage, [S]."""
        home = {action.stage: rank for rank, row in enumerate(self.actions) for action in row}
        return tuple(home[s] for s in range(self.stages))

    def __str__(self) -> str:
        """One line per rank, actions separated by commas: the compute-only CSV that torch's runtime loads."""
        return "\n".join(",".join(str(a) for a in row) for row in self.actions)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Reverse of `str`; empty cells (idle slots) are skipped."""
        rows = [[Action.parse(c) for c in line.split(",") if c.strip()] for line in text.strip().splitlines()]
        every = [a for row in rows for a in row]
        if not every:
            raise ScheduleError("a schedule needs at least one action")
        return build(rows, 1 + max(a.stage for a in every), 1 + max(a.microbatch for a in every))


def check_shape(ranks: int, microbatches: int) -> None:
    """Raise unless there is at least one rank and one microbatch."""
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(f"ranks and microbatches must be at least 1, got {ranks} and {microbatches}")


def build(rows: Sequence[Iterable[Action]], stages: int, microbatches: int) -> Schedule:
    """A schedule from every rank's actions, [P] rows; validated."""
    return Schedule(tuple(tuple(row) for row in rows), stages=stages, microbatches=microbatches)
