"""What processes tell each other before training state moves, and how they compare it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from pipeline_balance.pipeline.move.state import Held, space_of, spec_rows
from pipeline_balance.pipeline.run.agreement import error_text, refuse, refuse_where
from prophet.errors import TransitionError
from prophet.ranks.collective import Collective
from prophet.ranks.json_messages import gather_json, reasons_text
from prophet.ranks.operation import Operation
from prophet.state.space import Space

WHOLE = "the state from before the move is whole"


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """What one process says before state moves, in values that JSON can hold.

    Attributes:
        alike: What must be the same on all, by what those do that differ ("follow another schedule").
        refused: Why this process is against it; empty where nothing is wrong.
        cannot: Why its state cannot be moved; empty where nothing is wrong.
        tensors: What it holds, as `spec_rows` has it.
        numbers: What optimizers keep besides tensors, by name.
        ready: What was made ahead and holds for this state: 0 nothing, 1 what has travelled early, 2 the route too.
        early: Digests of what has travelled early, of those who sent and who got it.
        copies: Digests of what other processes have, too.
        ties: Digests of tied parameters.
        more: What this kind of move says besides.
        name: Of this move alone; the first process's counts.
    """

    alike: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""
    cannot: str = ""
    tensors: Sequence[Sequence[Any]] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)
    ready: int = 0
    early: Mapping[str, int] = field(default_factory=dict)
    copies: Mapping[str, Any] = field(default_factory=dict)
    ties: Mapping[str, Sequence[int]] = field(default_factory=dict)
    more: Any = None
    # fresh for every move, as words that ranks leave in a store stay there
    name: str = field(default_factory=lambda: secrets.token_hex(8))

    def to_json(self) -> dict[str, Any]:
        """Return its fields by name, as they travel."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def of(cls, held: Held | str, *, tensors: bool = True, **more: Any) -> Vote:
        """Make the vote of a process from what it holds, or from the reason why that cannot be moved.

        Args:
            held: What it holds, or the reason.
            tensors: Whether to describe the tensors; plain numbers always are.
            **more: Other fields of the vote.
        """
        if isinstance(held, str):
            return cls(cannot=held, **more)
        return cls(tensors=spec_rows(held.specs) if tensors else (), numbers=held.scalars, **more)


def votes_of(vote: Callable[[], Vote], collective: Collective, op: Operation) -> list[Vote]:
    """Gather all ranks' votes; collective. What keeps a rank from voting, it says as `refused`.

    Args:
        vote: Makes this rank's vote; its errors are not raised here.
        collective: Over all ranks.
        op: What errors call it.
    """
    try:
        mine = vote()
    except Exception as error:
        # raised here, it would leave the others waiting for this rank's vote
        mine = Vote(refused=error_text(error))
    return [Vote(**vote) for vote in gather_json(mine.to_json(), collective, op)]


def refuse_against(votes: Sequence[Vote], after: str) -> None:
    """Raise `SpecError` on all ranks where one is against it, with `after` for how things stand, or ranks differ."""
    refuse(None, [f"{vote.refused}; {after}" if vote.refused else "" for vote in votes])
    # refusals first: a rank that refuses has not filled in what is compared
    for what in dict.fromkeys(what for vote in votes for what in vote.alike):
        refuse_where([vote.alike.get(what) for vote in votes], what)


def union(votes: Sequence[Vote], after: str, of: Sequence[int] | None = None) -> tuple[Space, dict[str, Any]]:
    """Unite what ranks hold to a space, and their numbers by name; of a number, the lowest rank's holds.

    Args:
        votes: All ranks' votes.
        after: How things stand where it fails, for the error.
        of: The ranks whose state goes in one route (None: all).

    Raises:
        TransitionError: A rank could not say what it holds.
    """
    refuse_unmovable(votes, after)
    found = votes if of is None else [votes[rank] for rank in of]
    numbers: dict[str, Any] = {}
    for vote in reversed(found):
        numbers.update(vote.numbers)
    return space_of([row for vote in found for row in vote.tensors]), numbers


def refuse_unmovable(votes: Sequence[Vote], after: str) -> None:
    """Raise `TransitionError` where a rank's state cannot be moved."""
    problems = reasons_text([vote.cannot for vote in votes])
    if problems:
        # a reason may say already how things stand
        raise TransitionError(problems if after in problems else f"{problems}; {after}")


def share(held: Held | str, collective: Collective, of: Sequence[int]) -> tuple[Space, dict[str, Any]]:
    """Unite what ranks hold, see `union`; collective.

    Args:
        held: What this rank holds, or the reason why it cannot be moved.
        collective: Over all ranks.
        of: The ranks whose state goes in one route.
    """
    return union(votes_of(lambda: Vote.of(held), collective, Operation("describing state")), WHOLE, of)
