"""Where a schedule's messages are sent and received: the same order on both ends, so that no rank waits in a circle.

Shape legend: S stages, P ranks, M microbatches. The schedule is run on paper, one action per rank and turn. When an
action ends whose result another rank needs, both write the message down at that moment: the sender to send, the
receiver to begin receiving. So the messages between two ranks have one order, and all messages together have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline_balance.schedules.actions import SHARED, Action, ScheduleError


@dataclass(frozen=True, slots=True)
class Message:
    """A boundary (`forward`) or its gradient on its route from one rank to another.

    Prints as `send 1>2 of 0`, or `1<2` for a gradient.

    Attributes:
        what: Whether this rank sends or receives it.
        boundary: That between stage k and k + 1 is k + 1.
        forward: Whether it is an activation, not a gradient.
        microbatch: The unit.
        peer: The other rank.
    """

    what: Literal["send", "receive"]
    boundary: int
    forward: bool
    microbatch: int
    peer: int

    def __str__(self) -> str:
        arrow = ">" if self.forward else "<"
        return f"{self.what} {self.boundary - 1}{arrow}{self.boundary} of {self.microbatch}"


Step = Action | Message


def with_messages(rows: Sequence[Sequence[Action]], stage_ranks: Sequence[int]) -> list[list[Step]]:
    """Every rank's actions [P] with its messages between them; neighbours on one rank need none.

    Raises `ScheduleError` if the actions wait for each other in a circle.
    """
    stages = len(stage_ranks)
    # reversed, so that taking the next action is a pop
    left = [list(reversed(row)) for row in rows]
    out: list[list[Step]] = [[] for _ in rows]
    # inputs of the first stage are there from the start
    ready = {("F", 0, a.microbatch) for row in rows for a in row if a.kind == "F"}
    # a stage of each rank that shares a vocabulary
    sharing = {a.stage for row in rows for a in row if a.kind == "S"}
    while any(left):
        turn = [(r, row[-1]) for r, row in enumerate(left) if row and _may_run(row[-1], stages, ready, sharing)]
        if not turn:
            waiting = ", ".join(str(row[-1]) for row in left if row)
            raise ScheduleError(f"the actions wait for each other: {waiting}")
        for rank, action in turn:
            # all actions of a turn first: a message that is noted now is read in the next turn at the earliest
            left[rank].pop()
            out[rank].append(action)
        for rank, action in turn:
            s, m = action.stage, action.microbatch
            forward = action.kind == "F"
            ready.add((f"done {action.kind}", s, m))
            if action.kind in f"WH{SHARED}":
                continue
            neighbour = s + 1 if forward else s - 1
            if not 0 <= neighbour < stages:
                continue
            ready.add(("F" if forward else "B", neighbour, m))
            peer = stage_ranks[neighbour]
            # a stage on the same rank reads the tensor itself
            if peer != rank:
                boundary = max(s, neighbour)
                out[rank].append(Message("send", boundary, forward, m, peer))
                # on both ends at this moment, so that both have the messages in one order
                out[peer].append(Message("receive", boundary, forward, m, rank))
    return out


def received_ahead(steps: Sequence[Step]) -> list[Step]:
    """A rank's steps, where a receive begins one action earlier, so that the message comes while the rank computes.

    For transports whose receives bind nothing before the message is there. Messages from one rank keep their order.
    """
    at = [i for i, step in enumerate(steps) if isinstance(step, Action)]
    found = list(steps[: at[0]]) if at else list(steps)
    for here, following in zip(at, [*at[1:], len(steps)], strict=True):
        early: list[Step] = []
        stay: list[Step] = []
        # Peers with an earlier message that stays: their messages must not overtake it
        held_up: set[int] = set()
        for step in steps[here + 1 : following]:
            if not isinstance(step, Message) or step.what != "receive":
                stay.append(step)
            elif following < len(steps) and step.peer not in held_up and _brings_for(step, steps[following]):
                early.append(step)
            else:
                stay.append(step)
                held_up.add(step.peer)
        found += [*early, steps[here], *stay]
    return found


def _brings_for(message: Message, step: Step) -> bool:
    """Whether `step` reads what the message brings."""
    stage, kinds = (message.boundary, "F") if message.forward else (message.boundary - 1, "BI")
    return (
        isinstance(step, Action) and (step.stage, step.microbatch) == (stage, message.microbatch) and step.kind in kinds
    )


def _may_run(action: Action, stages: int, ready: set[tuple[str, int, int]], sharing: set[int]) -> bool:
    s, m = action.stage, action.microbatch

    def of_all(kind: str) -> bool:
        return all((f"done {kind}", stage, m) in ready for stage in sharing)

    if action.kind in "HE":
        return True
    if action.kind == "S":
        return ("done F", stages - 1, m) in ready
    if action.kind == "T":
        return of_all("S")
    if action.kind == "G":
        return not ready.isdisjoint({("done B", 0, m), ("done I", 0, m)})
    if action.kind == "F":
        return ("F", s, m) in ready and (s > 0 or of_all("E"))
    if action.kind == "W":
        return ("done I", s, m) in ready
    return ("done F", s, m) in ready and (of_all("T") if s == stages - 1 else ("B", s, m) in ready)


def forward_rows(stage_ranks: Sequence[int], microbatches: int) -> list[list[Action]]:
    """Forward only, for evaluation: every rank takes what comes first in time, [P]."""
    ranks = max(stage_ranks) + 1
    # without backwards, unit m is in stage s at time m + s
    every = [(m + s, s, m) for s in range(len(stage_ranks)) for m in range(microbatches)]
    return [[Action(s, "F", m) for _, s, m in sorted(every) if stage_ranks[s] == r] for r in range(ranks)]
