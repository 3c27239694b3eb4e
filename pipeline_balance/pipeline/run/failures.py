"""What goes wrong on one rank of a pipeline, in the same words on all of them.

The first rank to fail reports its rank, stages, action and cause to the others, gives up its communicators, and leaves.
The others learn of it in their waits. If a rank can report nothing any more, the others say where it was last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from pipeline_balance.pipeline.run.replicas import Grid
from pipeline_balance.schedules.actions import Action
from pipeline_balance.spec import StageMap
from prophet.errors import (
    CheckpointError,
    CollectiveError,
    ConfigMismatch,
    PlanMismatch,
    SpecError,
    StageFailed,
    TransitionError,
)
from prophet.ranks.process_group import ProcessGroupCollective
from prophet.ranks.waiting import uninterrupted

P = ParamSpec("P")
T = TypeVar("T")
# seconds in which a rank whose wait has failed learns why
GRACE_S = 3.0
KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "H": "help"} | {
    "E": "embedding",
    "S": "sums of the head",
    "T": "gradients of the head",
    "G": "gradient of the embedding",
}
# outside a stage's actions all ranks raise these together
AGREED = (SpecError, TransitionError, PlanMismatch, ConfigMismatch, CheckpointError)
# of a cause that travel to other ranks
_MOST_CHARACTERS = 2000


class Failures:
    """Makes one rank's failure that of all ranks; one per group.

    Args:
        collective: Over all ranks, by whose numbers they are named.
        give_up: Lets all waits for other ranks fail.

    Attributes:
        grid: Says which replica each process is in.
        error: What has failed; the pipeline is of no use from then on.
    """

    def __init__(self, collective: ProcessGroupCollective, give_up: Callable[[], None]) -> None:
        self.rank = collective.rank
        self.grid = Grid.of(collective.size, 1)
        self.give_up = give_up
        self.watch = collective.watched(self._stages_of)
        self.error: StageFailed | None = None
        self._map: StageMap | None = None
        self._what = self._action = ""

    def _stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(self._map.stages_on(self.grid.pipeline_rank_of(rank))) if self._map is not None else ()

    @contextmanager
    def during(self, what: str, stage_map: StageMap | None) -> Iterator[None]:
        """The context of what all ranks do together, such as a step. Whatever fails in it is raised as `StageFailed` on
        all of them.

        Ctrl-C is raised as it is on the ranks that get it. Errors that all ranks raise together pass: then nothing was
        lost, and the pipeline can go on.
        """
        if self.error is not None:
            raise self.error
        self.watch.begin()
        before = self._what
        self._what, self._action, self._map = what, "", stage_map
        self.watch.presence.where = f"in {what}"
        try:
            yield
            self.watch.presence.where = f"after {what}"
        except BaseException as error:
            if self.error is not None or agreed_by_all(error):
                raise
            # a second Ctrl-C must not keep the others waiting for a rank that is gone
            with uninterrupted():
                self.error = self._first_failure(error)
                self.give_up()
            # Ctrl-C
            if not isinstance(error, Exception):
                raise
            raise self.error from (error.__cause__ if isinstance(error, StageFailed) else error)
        finally:
            self._what = before

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """One action of a stage: whatever it raises is this rank's failure."""
        of = "in slot" if action.kind == "H" else "of microbatch"
        self._action = f", {KINDS[action.kind]} {of} {action.microbatch}"
        self.watch.presence.where = f"in {self._what}{self._action}"
        try:
            yield
        except Exception as error:
            if isinstance(error, StageFailed) or _lost(error) is not None:
                raise
            raise self._own(error, (action.stage,)) from error
        self._action = ""

    def _first_failure(self, error: BaseException) -> StageFailed:
        """The first failure of all ranks, once this one is reported."""
        if isinstance(error, StageFailed):
            return self.watch.report(error)
        lost = _lost(error)
        if lost is None:
            return self.watch.report(self._own(error, self._stages_of(self.rank)))
        # a wait that failed is a consequence: the rank that failed first reports the cause meanwhile
        return self.watch.explain(self._neighbour(lost), GRACE_S)

    def _own(self, error: BaseException, stages: tuple[int, ...]) -> StageFailed:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        cause = "interrupted" if isinstance(error, KeyboardInterrupt) else text[:_MOST_CHARACTERS]
        return StageFailed(self.rank, stages, f"{self._what}{self._action}", cause)

    def _neighbour(self, lost: CollectiveError) -> StageFailed:
        """Who was waited for, where nothing else is known."""
        what = f"{self._what}{self._action}"
        waited = f"{what}, while rank {self.rank} waited in {lost.operation!s}"
        if len(lost.peers) == 1:
            peer = self.watch.ranks.index(lost.peers[0])
            return StageFailed(peer, self._stages_of(peer), waited, str(lost))
        return StageFailed(self.rank, self._stages_of(self.rank), what, f"{lost}. {self.watch.places()}")


def agreed_by_all(error: BaseException) -> bool:
    """Whether all ranks raise this error together, outside of a stage's actions: then none of them waits for another.

    Args:
        error: What one of them has raised.
    """
    return isinstance(error, AGREED) and _lost(error) is None


def fails_together(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a method of a pipeline that all ranks call together: see `Failures.during`."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def call(*args: P.args, **options: P.kwargs) -> T:
            pipeline: Any = args[0]
            with pipeline.failures.during(f"{what} {pipeline.progress.updates}", pipeline.stage_map):
                return method(*args, **options)

        return call

    return decorate


def _lost(error: BaseException | None) -> CollectiveError | None:
    """The collective that failed, if one is behind this error."""
    while error is not None:
        if isinstance(error, CollectiveError):
            return error
        error = error.__cause__
    return None
