"""A pipeline schedule as a value: what every rank computes, in order, printable and read back.

Shape legend: S stages, P ranks, M microbatches, N slices of a microbatch. What passes the stages is a unit: a
microbatch, or slice n of microbatch m, which is unit m N + n. An action prints as stage, kind, unit (`2F0`), the
notation of `torch.distributed.pipelining`, so a printed schedule can be handed to torch's runtime. Kinds: F forward, I
backward for the input only, W backward for the weights only, B both at once. Torch does not have the others. H is of a
rank without a pass that helps others with theirs; its number is that of the time slot, and its stage one of the rank's.
With a vocabulary that is split over the ranks, every rank has four more actions for each unit, see
`schedules.vocabulary`: E and G of the embedding, S and T of the head. Their stage is one of the rank's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, cast, get_args

from prophet.errors import SpecError

Kind = Literal["F", "I", "W", "B", "H", "E", "S", "T", "G"]
SHARED = "ESTG"
"""Kinds that every rank runs for every unit."""
_KINDS = get_args(Kind)
# kinds that come after another one of the same unit in the same stage
_NEEDS: dict[Kind, Kind] = {"I": "F", "B": "F", "W": "I"}
# what is looked up of actions: for long schedules, making others to look for takes most of the time
_Key = tuple[int, str, int]
# the notation of torch.distributed.pipelining
_ACTION = re.compile(r"(\d+)([FIWBHESTG])(\d+)")


class ScheduleError(SpecError):
    """A schedule misses or repeats work, or waits for itself; the message names the actions."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One piece of computation: `kind` of unit `microbatch` in stage `stage`. Without slices a unit is a microbatch.

    Of a help, `microbatch` is the slot.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __post_init__(self) -> None:
        if self.stage < 0 or self.microbatch < 0 or self.kind not in _KINDS:
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
    """The actions of each of P ranks in order, and how many stages, microbatches and slices they are of.

    Valid when built: every stage runs on one rank; every unit passes F once and either B once, or I and then W once.
    In each stage the slices of a microbatch go forward in order and backward in reverse, as attention to earlier
    slices asks for. Whether the order can run at all is what `simulate` finds out.

    Attributes:
        actions: By rank [P], in order.
        stages: S.
        microbatches: M.
        slices: N, of every microbatch; 1: it passes whole.
    """

    actions: tuple[tuple[Action, ...], ...]
    stages: int
    microbatches: int
    slices: int = 1

    def __post_init__(self) -> None:
        if min(len(self.actions), self.stages, self.microbatches, self.slices) < 1:
            got = f"{len(self.actions)}, {self.stages}, {self.microbatches} and {self.slices}"
            raise ScheduleError(f"a schedule needs ranks, stages, microbatches and slices, got {got}")
        # rank of every stage seen so far; a stage has its weights on one rank alone
        home: dict[int, int] = {}
        seen: set[_Key] = set()
        for rank, row in enumerate(self.actions):
            for action in row:
                self._check_action(action, rank, home, seen)
                seen.add((action.stage, action.kind, action.microbatch))
        self._check_complete(seen)
        self._check_shared()

    def _check_action(self, action: Action, rank: int, home: dict[int, int], seen: set[_Key]) -> None:
        stage, kind, unit = action.stage, action.kind, action.microbatch
        if stage >= self.stages or (unit >= self.units and kind != "H"):
            slices = f" x {self.slices} slices" if self.slices > 1 else ""
            raise ScheduleError(f"{action} is outside {self.stages} stages x {self.microbatches} microbatches{slices}")
        if home.setdefault(stage, rank) != rank:
            raise ScheduleError(f"stage {stage} appears on ranks {home[stage]} and {rank}")
        if (stage, kind, unit) in seen:
            raise ScheduleError(f"{action} appears twice")
        # an order within the stage is all that is checked here: other stages may be on other ranks
        needs = _NEEDS.get(kind)
        if needs is not None and (stage, needs, unit) not in seen:
            raise ScheduleError(f"{action} comes before {needs} of the same {self._unit}")
        if self.slices > 1:
            self._check_slice(action, seen)

    def _check_slice(self, action: Action, seen: set[_Key]) -> None:
        """Raise unless the slice that must come before `action`'s in its stage has come."""
        stage, kind, unit = action.stage, action.kind, action.microbatch
        place = unit % self.slices
        if kind == "F" and place > 0 and (stage, "F", unit - 1) not in seen:
            raise ScheduleError(f"{action} comes before {Action(stage, 'F', unit - 1)}: slices go forward in order")
        # gradients of a slice's keys and values come from the slices after it
        if (
            kind in ("I", "B")
            and place < self.slices - 1
            and (stage, "B", unit + 1) not in seen
            and (stage, "I", unit + 1) not in seen
        ):
            later = f"{Action(stage, 'B', unit + 1)} or {Action(stage, 'I', unit + 1)}"
            raise ScheduleError(f"{action} comes before {later}: slices go backward in reverse order")

    def _check_complete(self, seen: set[_Key]) -> None:
        for s, u in product(range(self.stages), range(self.units)):
            kinds = "".join(k for k in "FIWB" if (s, k, u) in seen)
            if kinds not in ("FB", "FIW"):
                runs = kinds or "nothing"
                raise ScheduleError(f"{self._unit} {u} in stage {s} runs {runs}, expected F and B, or F, I and W")

    def _check_shared(self) -> None:
        """Raise unless each rank has its part in the embedding and the head of each unit, in one order on all ranks."""
        orders = [[(a.kind, a.microbatch) for a in row if a.kind in SHARED] for row in self.actions]
        if not any(orders):
            return
        home = self.stage_ranks
        for rank, (row, order) in enumerate(zip(self.actions, orders, strict=True)):
            wanted = product(SHARED, range(self.units))
            lacks = [f"{kind} of {self._unit} {unit}" for kind, unit in wanted if (kind, unit) not in set(order)]
            if lacks:
                raise ScheduleError(f"rank {rank} skips {lacks[0]}, in which every rank has a part")
            # ranks exchange messages in it
            odd = next(((a, b) for a, b in zip(order, orders[0], strict=False) if a != b), None)
            if odd is not None or len(order) != len(orders[0]):
                mine, first = (f"{kind}{unit}" for kind, unit in odd or (order[-1], orders[0][-1]))
                raise ScheduleError(f"rank {rank} runs {mine} where rank 0 runs {first}: their order must be the same")
            at: dict[tuple[str, int, int], int] = {(a.kind, a.stage, a.microbatch): i for i, a in enumerate(row)}
            at |= {(a.kind, -1, a.microbatch): i for i, a in enumerate(row) if a.kind in SHARED}
            last = self.stages - 1
            for unit in range(self.units):
                pairs = [(("S", -1), ("T", -1))]
                if home[0] == rank:
                    pairs += [(("E", -1), ("F", 0)), *(((kind, 0), ("G", -1)) for kind in "BI")]
                if home[last] == rank:
                    pairs += [(("F", last), ("S", -1)), *((("T", -1), (kind, last)) for kind in "BI")]
                for before, after in pairs:
                    i, j = at.get((*before, unit)), at.get((*after, unit))
                    if i is not None and j is not None and i > j:
                        raise ScheduleError(f"rank {rank}: {row[j]} comes before {row[i]}, whose result it needs")

    @property
    def shares(self) -> bool:
        """Whether ranks share a split vocabulary."""
        return any(a.kind in SHARED for a in self.actions[0])

    def passes(self) -> Schedule:
        """The same without what ranks share."""
        rows = [[a for a in row if a.kind not in SHARED] for row in self.actions]
        return build(rows, self.stages, self.microbatches, self.slices) if self.shares else self

    @property
    def units(self) -> int:
        """M N: what passes every stage forward and backward."""
        return self.microbatches * self.slices

    @property
    def _unit(self) -> str:
        return "unit" if self.slices > 1 else "microbatch"

    @property
    def ranks(self) -> int:
        """P."""
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
    def parse(cls, text: str, slices: int = 1) -> Schedule:
        """Reverse of `str`, which leaves `slices` out; empty cells (idle slots) are skipped."""
        rows = [[Action.parse(c) for c in line.split(",") if c.strip()] for line in text.strip().splitlines()]
        every = [a for row in rows for a in row]
        if not every:
            raise ScheduleError("a schedule needs at least one action")
        # a help has the number of a slot
        units = 1 + max((a.microbatch for a in every if a.kind != "H"), default=0)
        if slices < 1 or units % slices:
            raise ScheduleError(f"{units} units are no whole microbatches of {slices} slices")
        return build(rows, 1 + max(a.stage for a in every), units // slices, slices)


def check_shape(ranks: int, microbatches: int) -> None:
    """Raise unless there is at least one rank and one microbatch."""
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(f"ranks and microbatches must be at least 1, got {ranks} and {microbatches}")


def build(rows: Sequence[Iterable[Action]], stages: int, microbatches: int, slices: int = 1) -> Schedule:
    """A schedule from every rank's actions; validated.

    Args:
        rows: Actions by rank [P].
        stages: S.
        microbatches: M.
        slices: N.
    """
    return Schedule(tuple(tuple(row) for row in rows), stages=stages, microbatches=microbatches, slices=slices)
