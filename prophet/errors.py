"""Every error that the library raises for its users, in one place.

All of them carry one sentence that says what was expected, and where: rank, layer, file or field.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prophet.ranks.operation import Operation


def in_a_line(error: BaseException) -> str:
    """The first line of what an error says, or its class where it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class SpecError(ValueError):
    """A value was built from figures that contradict each other; the message says what was expected."""


class ArgumentError(SpecError, TypeError):
    """An argument has a name or is of a kind that was not expected; the message says which, and what was expected."""


class CoreError(RuntimeError):
    """The planner's compiled core is missing, or was built from other sources; the message has the command to run."""


class LayoutError(SpecError):
    """A layout does not describe the space it is of; the message names tensor, box and rank."""


class TransitionError(RuntimeError):
    """State could not be moved; what every rank held before is whole.

    own: this rank's own problem in words, empty where others have one; None: the message is all there is.
    """

    own: str | None = None


class BudgetError(LayoutError, TransitionError):
    """The memory budget is too small for even one element on its way."""


class StateLost(RuntimeError):
    """A move in place failed on the way: neither the old state nor the new one is whole on any rank."""


class TraceError(ValueError):
    """A trace cannot be read or written; names the file, the field and what was expected."""


class TextError(ValueError):
    """There is no usable text for the demo; the message says where it was looked for and what was expected."""


class TopologyError(ValueError):
    """A topology file cannot be used; names the file, the field and what was expected."""


class BenchmarkFileError(SpecError):
    """A benchmark's file cannot be used; names the file, the field and what was expected."""


class CollectiveError(RuntimeError):
    """A collective failed; carries the rank that noticed, the operation it was in, and the ranks it waited for if it
    were few: those that a message comes from or goes to.
    """

    peers: tuple[int, ...] = ()

    def __init__(self, rank: int, operation: Operation, reason: str) -> None:
        super().__init__(f"rank {rank}: {operation} failed: {reason}")
        self.rank = rank
        self.operation = operation


class CollectiveTimeout(CollectiveError):
    """A collective did not finish within its time limit."""


class PeerLost(CollectiveError):
    """A peer ended or closed its connection in the middle of a collective; the message names those that are gone."""


class RankFailed(RuntimeError):
    """The ranks could not run to their end; the message says which one ended, and how."""


class StageFailed(RankFailed):
    """A rank of a pipeline failed, and with it all ranks; it says on each of them which rank was the first.

    rank: in the pipeline's group. stages: those it ran. action: what it was in, or what another one waited for it in.
    cause: its own words, or how it was lost.
    """

    def __init__(self, rank: int, stages: Sequence[int], action: str, cause: str) -> None:
        number = ", ".join(map(str, stages))
        place = f"stage{'s' * (len(stages) > 1)} {number}" if stages else "no stage"
        super().__init__(f"rank {rank} ({place}) failed in {action}: {cause}")
        self.rank = rank
        self.stages = tuple(stages)
        self.action = action
        self.cause = cause


class RoutingError(ValueError):
    """The gate produced scores that cannot be routed."""


class PlanMismatch(RuntimeError):
    """The ranks do not agree on what they are about to do; the message names those that differ."""


class OutOfStep(PlanMismatch):
    """A rank has skipped or repeated a step, a layer or a pass; the message says which rank is where."""


class ConfigMismatch(RuntimeError):
    """The ranks were configured differently; the message names those that differ."""


class GradientMismatch(RuntimeError):
    """Ranks have used different gradients of the parameters that they share; the message names step, ranks and call."""


class ExpertsMixed(RuntimeError):
    """Something has treated the experts of different ranks as copies of one; the message names layer and ranks."""


class ReplicaMemoryError(MemoryError):
    """The replica pool has no room left within its byte budget."""


class ConversionError(ValueError):
    """A model cannot be converted, or not without changing what it computes; the message names the field."""


class ReplayError(RuntimeError):
    """A block does not call its experts twice in the same way; the message names the list of experts."""


class PartialStateError(RuntimeError):
    """What is about to be written holds the experts of one rank only; the message says which call writes them all."""


class CheckpointError(SpecError):
    """A folder holds no checkpoint of this model and optimizer; the message names what differs."""


class ReportError(ValueError):
    """The report's parts do not fit together, or it cannot be drawn; the message says what was expected."""


class MonitorError(ValueError):
    """There is no run to show; the message says where it was looked for and what was expected."""


class UsageError(ValueError):
    """A command's arguments or input cannot be used; one line says why."""


def no_such(kind: str, name: str, known: Sequence[str]) -> str:
    """The message where `name` is none of the `known` ones; it suggests the closest of them."""
    return f"there is no {kind} {name!r}{nearest(name, known)} (the {kind}s are {', '.join(known)})"


def nearest(name: str, known: Sequence[str]) -> str:
    """The question whether the closest of the `known` names was meant; nothing where none is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def some(names: Iterable[str], shown: int = 4) -> str:
    """The first names, and how many more there are."""
    listed = sorted(names)
    return ", ".join(listed[:shown]) + (f" and {len(listed) - shown} more" if len(listed) > shown else "")
