"""What processes say before training state moves, and how they compare it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

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
    """What one process says before state moves, in what JSON can say.

    alike: what must be the same on all, by what those do that differ ("follow another schedule").
    refused: why this process is against it; cannot: why its state cannot be moved. Both empty where nothing is wrong.
    tensors: what it holds, as `spec_rows` has it. numbers: what optimizers keep besides, by name.
    ready: a route that was found ahead holds for this state.
    copies: digests of what other processes have, too. ties: those of tied parameters.
    more: what this kind of move says besides. name: of this move alone; the first process's counts.
    """

    alike: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""
    cannot: str = ""
    tensors: Sequence[Sequence[Any]] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)
    ready: bool = False
    copies: Mapping[str, Any] = field(default_factory=dict)
    ties: Mapping[str, Sequence[int]] = field(default_factory=dict)
    more: Any = None
    name: str = field(default_factory=lambda: secrets.token_hex(8))

    def to_json(self) -> dict[str, Any]:
        """Its fields by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def of(cls, held: Held | str, *, tensors: bool = True, **more: Any) -> Vote:
        """The vote of a process that has found what it holds, or in words why it cannot be moved.

        Without `tensors`, only its numbers are said.
        """
        if isinstance(held, str):
            return cls(cannot=held, **more)
        return cls(tensors=spec_rows(held.specs) if tensors else (), numbers=held.scalars, **more)


def votes_of(vote: Callable[[], Vote], collective: Collective, device: torch.device, op: Operation) -> list[Vote]:
    """All ranks' votes; collective. What keeps a rank from voting, it says as `refused`."""
    try:
        mine = vote()
    except Exception as error:
        mine = Vote(refused=error_text(error))
    return [Vote(**vote) for vote in gather_json(mine.to_json(), collective, device, op)]


def refuse_against(votes: Sequence[Vote], after: str) -> None:
    """Raise `SpecError` on all ranks where one is against it, with `after` for how things stand, or ranks differ."""
    refuse(None, [f"{vote.refused}; {after}" if vote.refused else "" for vote in votes])
    for what in votes[0].alike:
        refuse_where([vote.alike.get(what) for vote in votes], what)


def union(votes: Sequence[Vote], after: str) -> tuple[Space, dict[str, Any]]:
    """The space of all ranks' tensors, and all numbers by name, of the lowest rank that has one.

    Raises `TransitionError` where one could not say what it holds, with `after` for how things stand.
    """
    refuse_unmovable(votes, after)
    numbers: dict[str, Any] = {}
    for vote in reversed(votes):
        numbers.update(vote.numbers)
    return space_of([row for vote in votes for row in vote.tensors]), numbers


def refuse_unmovable(votes: Sequence[Vote], after: str) -> None:
    """Raise `TransitionError` where a rank's state cannot be moved."""
    problems = reasons_text([vote.cannot for vote in votes])
    if problems:
        raise TransitionError(problems if after in problems else f"{problems}; {after}")


def share(
    held: Held | str, collective: Collective, device: torch.device, after: str = WHOLE
) -> tuple[Space, dict[str, Any]]:
    """The `union` of what all ranks hold; collective."""
    return union(votes_of(lambda: Vote.of(held), collective, device, Operation("describing state")), after)
