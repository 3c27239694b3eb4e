"""One transaction runs every change of where training state lives, on every process: all of it, or nothing.

| phase | what a process does | what fails in it |
|---|---|---|
| agree | says in a `Vote` what it holds and was asked for; all compare the votes | is raised on all processes alike |
| prepare | makes on the side what needs no values | keeps all from moving |
| move | sends and receives boxes of tensors (`prophet.state.transition`) | stands against the move |
| assemble | makes the assignments that put the new state in force, and checks them | stands against the move |
| decide | hears whether all are ready; where ranks have lost each other, the first word in a store holds | the same |
| apply | makes the assignments, each of them whatever the others do | is raised once all were made |

Until the decision the state from before is whole and in force. In place, its memory is given up on the way: from the
first rank that begins to move on, what fails is the loss of the state on all of them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline_balance.pipeline.move.ahead import Early
from pipeline_balance.pipeline.move.votes import WHOLE, Vote, votes_of
from prophet.errors import BudgetError, CollectiveError, StageFailed, StateLost, TransitionError, in_a_line
from prophet.ranks.collective import Collective, Decision
from prophet.ranks.json_messages import gather_json, reasons_text
from prophet.ranks.operation import Operation
from prophet.ranks.waiting import uninterrupted
from prophet.state.layout import Piece
from prophet.state.route_schedule import RouteSchedule
from prophet.state.space import TensorSpec
from prophet.state.transition import Allocate, Mode, Moved, State, transition

NOTHING = "nothing has moved"
LOST = "neither the old state nor the new one is whole"
DECISION = Operation("deciding on a move")

Assignments = Sequence[Callable[[], None]]
"""What is left to do once all have decided; cannot fail."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What was made ahead of a move.

    Attributes:
        target: What it goes to.
        specs: The description of the state that the route is for.
        route: The route; None where it could not be made.
        early: What has travelled before; None: nothing. The route is of the rest then.
        problem: Why it could not be made.
        broken: Whether processes have lost each other meanwhile.
    """

    target: Any = None
    specs: tuple[TensorSpec, ...] = ()
    route: RouteSchedule | None = None
    early: Early | None = None
    problem: str = ""
    broken: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Switched:
    """What a move of training state took on this process.

    Attributes:
        seconds: How long the process was held up.
        link_bytes: Bytes of the state by sending and receiving rank of the route, the same on all processes.
        messages, sent_bytes, received_bytes: This rank's own.
        early_bytes: Of what it has sent and received, what travelled while the process went on computing.
        buffer_bytes: The move's buffers.
        peak_bytes: The most that old state, new state and buffers took together.
    """

    seconds: float
    link_bytes: Mapping[tuple[int, int], int]
    messages: int
    sent_bytes: int
    received_bytes: int
    buffer_bytes: int
    peak_bytes: int
    early_bytes: int = 0


class Move(ABC):
    """One change of where training state lives, as one process sees it: what `run` takes through its phases.

    Attributes:
        what: Its name in errors.
        whole: How things stand where it fails.
        mode: "safe" keeps the old state until all have decided, "in-place" gives it up on the way.
        device: Where the state lies.
        budget_bytes: Bounds the buffers.
        allocate: How memory is asked for.
    """

    what = "a move"
    whole = WHOLE
    mode: Mode = "safe"
    device: torch.device
    budget_bytes: int
    allocate: Allocate

    @abstractmethod
    def vote(self) -> Vote:
        """Make this process's vote; what it raises stands against the move."""

    @abstractmethod
    def compare(self, votes: Sequence[Vote]) -> None:
        """Raise the same error on all processes where the votes do not fit together."""

    @abstractmethod
    def route_schedule(self, carrier: Collective) -> RouteSchedule:
        """Find the route of the state, once all have voted; collective."""

    def prepare(self, route_schedule: RouteSchedule) -> None:  # noqa: B027 (not every move has something to prepare)
        """Make on the side what needs no values; raises what keeps this process from moving."""

    @abstractmethod
    def state(self, pieces: Sequence[Piece]) -> State:
        """Return this process's tensors of the old layout."""

    def beside(self, pieces: Sequence[Piece]) -> Sequence[Tensor]:
        """Return tensors besides those that are given up with the state in place, and do not move."""
        return ()

    @abstractmethod
    def assemble(self, moved: Moved) -> Assignments:
        """Return what puts the new state in force, all of it checked."""

    def drop(self) -> None:  # noqa: B027 (only moves in place lose state)
        """Forget the state that was lost."""


def run(move: Move, *, world: Collective, carrier: Collective, then: Assignments = ()) -> Switched:
    """Take a move from the votes to its end; collective over `world` and `carrier`.

    Where the carrier is of all ranks they decide in it, and nothing of `world` is used once they have voted: after an
    error the caller can make another carrier, and go on.

    Args:
        move: The move, made alike on all ranks.
        world: Over all ranks.
        carrier: Brings the state; over all ranks, or those of this rank's replica.
        then: Assignments that follow the move's own.

    Returns:
        What the move took on this process.

    Raises:
        TransitionError: On all ranks where something fails up to the decision (`BudgetError` where the budget is too
            small). What `move.compare` raises comes as it is, on all ranks.
        StateLost: The state was given up by then.
        Exception: What ended this rank's messages in the middle of the move, where there is no other carrier.
    """
    began = time.perf_counter()
    votes = votes_of(move.vote, world, Operation(f"agreeing on {move.what}"))
    move.compare(votes)
    # one name for all ranks, under which their words stand in the store
    name = votes[0].name
    whole = carrier.size == world.size
    begin = _Begin(carrier, f"{name} begins", move.mode)
    alone = not whole or carrier is world
    failed: Exception | None = None
    moved: Moved | None = None
    sending = False
    assignments: Assignments = ()
    try:
        route_schedule = move.route_schedule(carrier)
        # not raised here: the transition takes it along to the point where all ranks learn of it
        problem = _error_text_of(lambda: move.prepare(route_schedule))
        pieces = route_schedule.route.before.on(carrier.rank)
        state, beside = move.state(pieces), move.beside(pieces)
        sending = True
        moved = transition(
            route_schedule.route,
            state,
            carrier,
            budget_bytes=move.budget_bytes,
            mode=move.mode,
            device=move.device,
            allocate=move.allocate,
            beside=beside,
            problem=problem,
            begin=begin.now,
            # the ranks have voted already, and decide below
            votes=False,
            ahead=route_schedule,
        )
        sending = False
        assignments = move.assemble(moved)
    except Exception as error:
        # Others wait for messages that do not come any more, and not in the decision: a failure ends their waits.
        # What the transition raises by itself it has said, or sent all messages before.
        raised = not isinstance(error, (TransitionError, CollectiveError, StageFailed))
        if raised and sending and alone and move.mode == "safe":
            raise
        # `moved` may be set where assembling failed
        failed, moved = error, None
    decision = _decide(carrier if whole else world, name, failed)
    if decision.against or moved is None:
        raise _refusal(move, failed, decision, begin, world.rank, alone=alone)
    # nothing can keep the new state from being in force any more
    apply([*assignments, *then])
    return Switched(
        seconds=time.perf_counter() - began,
        link_bytes=route_schedule.route.link_bytes,
        messages=moved.messages,
        sent_bytes=moved.sent_bytes,
        received_bytes=moved.received_bytes,
        buffer_bytes=moved.buffer_bytes,
        peak_bytes=moved.peak_bytes,
    )


class _Begin:
    """Whether any rank has begun to move in place, after which the old state is whole nowhere."""

    def __init__(self, collective: Collective, name: str, mode: Mode) -> None:
        self._collective, self._name, self._in_place = collective, name, mode == "in-place"
        self.begun = False

    def now(self) -> None:
        """This rank begins, unless another one has failed before it did."""
        # A rank that knows that all are ready says yes before it gives anything up, one that has failed before that
        # says no, and the first word in the store holds.
        if self._in_place and self._collective.settle(self._name, "yes") != "yes":
            raise TransitionError("another rank has not heard that all were ready")
        self.begun = True

    def lost(self) -> bool:
        """Whether the old state is gone."""
        return self._in_place and (self.begun or self._collective.settle(self._name, "no") == "yes")


def _decide(collective: Collective, name: str, failed: Exception | None) -> Decision:
    """What stands against it: the reasons of the ranks that were not ready, where they can still be reached."""
    try:
        decision = collective.decide(DECISION, name, ready=failed is None)
        if decision.unready:
            reason = reasons_text(gather_json(_error_text(failed), collective, Operation("telling why a move failed")))
            return decision._replace(against=reason or decision.against)
    except Exception as error:
        # Ranks have lost each other. The first word in the store decides for all, so that no rank takes the new state
        # while another keeps the old one.
        if collective.settle(name, "no") == "yes":
            return Decision()
        return Decision(against=_error_text(failed or error))
    return decision


def _refusal(
    move: Move, failed: Exception | None, decision: Decision, begin: _Begin, rank: int, *, alone: bool
) -> Exception:
    """The error of a move that has failed.

    With `alone`, ranks have no other communicator, so those that have lost each other cannot go on.
    """
    reason = decision.against
    if begin.lost():
        move.drop()
        # what is left is neither state, so it is dropped: using it is an error then
        return StateLost(f"{reason}; {LOST}")
    before = f"{NOTHING}, and " if decision.unready and not begin.begun and NOTHING not in reason else ""
    text = reason if move.whole in reason else f"{reason}; {before}{move.whole}"
    if alone and isinstance(failed, StageFailed):
        return failed
    error = (BudgetError if isinstance(failed, BudgetError) else TransitionError)(text)
    if alone:
        cause = failed.__cause__ if failed is not None else None
        if isinstance(cause, CollectiveError) or not decision.unready:
            # a collective as the cause tells `Failures` that the communicators are of no use any more
            error.__cause__ = cause if isinstance(cause, CollectiveError) else CollectiveError(rank, DECISION, reason)
    return error


def apply(assignments: Assignments) -> None:
    """Make them all, where none can fail: what one of them raises is raised once the new state is in force."""
    first: Exception | None = None
    # Ctrl-C between two assignments would leave parts of both states in force
    with uninterrupted():
        for assign in assignments:
            try:
                assign()
            except Exception as error:
                first = first or error
    if first is not None:
        raise first


def _error_text_of(call: Callable[[], None]) -> str:
    try:
        call()
    except Exception as error:
        return _error_text(error)
    return ""


def _error_text(error: Exception | None) -> str:
    """What an error says of this rank, in one line; nothing where it is about others."""
    if error is None:
        return ""
    if isinstance(error, TransitionError) and error.own is not None:
        return error.own
    return in_a_line(error)
