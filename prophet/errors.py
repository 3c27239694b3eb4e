"""Every error that the library raises for its users, in one place.

All of them carry one sentence with what was expected, and where: rank, layer, file or field.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prophet.ranks.operation import Operation


def in_a_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class where it has none."""
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

    Attributes:
        own: The text of this rank's problem, empty where only others have one; None where the message is all there is.
    """

    own: str | None = None


class BudgetError(LayoutError, TransitionError):
    """The memory budget is too small for even one element on its way."""


class StateLost(RuntimeError):
    """A move in place failed on the way: neither the old state nor the new one is whole on any rank."""


class ReshardedError(RuntimeError):
    """Something failed on this rank after all had decided on a reshard: the new layout is in force everywhere.

    Args:
        reason: What failed.
        model: The model in the new layout, which `reshard` would have returned.

    Attributes:
        model: The same; the optimizer trains it already, and the old one refuses to run.
    """

    def __init__(self, reason: str, model: Any) -> None:
        super().__init__(
            f"the new layout is in force, and something failed after that: {reason}; go on with error.model"
        )
        self.model = model


class TraceError(ValueError):
    """A trace cannot be read or written; names the file, the field and what was expected."""


class TextError(ValueError):
    """There is no usable text for the demo; the message says where it was looked for and what was expected."""


class TopologyError(ValueError):
    """A topology file cannot be used; names the file, the field and what was expected."""


class BenchmarkFileError(SpecError):
    """A benchmark's file cannot be used; names the file, the field and what was expected."""


class CollectiveError(RuntimeError):
    """A collective failed.

    Args:
        rank: The rank that noticed.
        operation: The operation that it was in.
        reason: What happened, for the message.

    Attributes:
        peers: The other ends of messages, by their numbers among all processes; empty where all ranks take part.
    """

    # Set by the caller: most operations take all ranks
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
    """A rank of a pipeline failed, and with it all ranks; the error names on each of them the first one.

    Args:
        rank: The first rank to fail, by its number in the pipeline's group.
        stages: The stages that it ran.
        action: What it was doing, or what another rank waited for.
        cause: The text of its error, or how it was lost.
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
    """Word the message for a name that is not known.

    Args:
        kind: What is named, in the singular.
        name: The unknown name.
        known: The names that exist; the closest is suggested.
    """
    return f"there is no {kind} {name!r}{nearest(name, known)} (the {kind}s are {', '.join(known)})"


def nearest(name: str, known: Sequence[str]) -> str:
    """Ask whether the closest of the `known` names was meant; empty where none is close."""
    # Below a similarity of one half suggestions are noise
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def some(names: Iterable[str], shown: int = 4) -> str:
    """List the first names, and count the others."""
    # Sorted, so that all ranks word the same message
    listed = sorted(names)
    return ", ".join(listed[:shown]) + (f" and {len(listed) - shown} more" if len(listed) > shown else "")
