"""Moving a whole pipeline to other processes: other stages, other replicas, other owners of the optimizer's state.

A stage map moves layers within every replica. Here all processes move at once, from the places they have to the places
that others are to have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from pipeline_balance.pipeline.model.ownership import Ownership
from pipeline_balance.pipeline.move.pipeline_state import PipelineState, TrainingLayout
from pipeline_balance.pipeline.move.state import Held, spec_rows, specs_of
from pipeline_balance.pipeline.move.transaction import Assignments, Move, Prepared, Switched, run
from pipeline_balance.pipeline.move.votes import Vote, refuse_against, refuse_unmovable
from pipeline_balance.pipeline.run.agreement import error_text
from pipeline_balance.pipeline.run.ties import Tie, refuse_untied, tie_digests, ties_of
from pipeline_balance.schedules.actions import Schedule
from prophet.errors import SpecError
from prophet.ranks.collective import Collective
from prophet.ranks.json_messages import gather_json
from prophet.ranks.operation import Operation
from prophet.state.layout import Piece
from prophet.state.route_schedule import RouteSchedule
from prophet.state.transition import Mode, Moved, State


@dataclass
class LayoutMove(Move):
    """A pipeline goes to `target`, with the state that `pipeline_state` knows; between updates. Gradients are dropped.

    `compare` refuses an update under way, votes that differ, and ties that have come apart (`SpecError`). It refuses
    state that cannot be moved (`TransitionError`).

    Attributes:
        pipeline_state: The pipeline's training state.
        target: The layout to go to; None where this process was given none, which `on_votes` must refuse.
        compared: What must be the same on all processes, by what those do that differ.
        prepared: A route that was found ahead.
        extra_vote: What the caller votes on besides.
        on_votes: Gets the extra votes of all before anything else is compared, and may raise.
        mode: Whether the old state is kept until all have decided ("safe") or given up on the way ("in-place").
    """

    what = "a switch"

    pipeline_state: PipelineState
    target: TrainingLayout | None
    compared: Mapping[str, Any]
    prepared: Prepared = field(default_factory=Prepared)
    extra_vote: Callable[[], Any] = lambda: None
    on_votes: Callable[[list[Any]], None] = lambda extra_vote: None
    mode: Mode = "safe"

    def __post_init__(self) -> None:
        mover = self.pipeline_state.mover
        self.device, self.budget_bytes, self.allocate = mover.device, mover.budget_bytes, mover.allocate
        self._ties: tuple[Tie, ...] = ()
        self._new_owner: Ownership | None = None
        self._schedule: Schedule | None = None

    def vote(self) -> Vote:
        pipeline_state, refused, ties = self.pipeline_state, "", dict[str, tuple[int, int]]()
        # outside the `try`: `on_votes` gets what it returns from a process that refuses, too
        extra = self.extra_vote()
        try:
            ties = self._read() if self.target is not None else {}
        except Exception as error:
            refused = error_text(error)
        self._held = held = pipeline_state.describe()
        ready = self.prepared.route is not None and self.prepared.specs == specs_of(held)
        schedule = pipeline_state.mover.builder.number(self._schedule) if self._schedule is not None else 0
        return Vote(
            alike={**self.compared, "switch in another mode": self.mode, "follow another schedule": schedule},
            refused=refused,
            cannot=held if isinstance(held, str) else "",
            numbers=pipeline_state.numbers_to_vote(held) if isinstance(held, Held) else {},
            ready=ready,
            copies=pipeline_state.copies(),
            ties=ties,
            more=extra,
        )

    def _read(self) -> dict[str, tuple[int, int]]:
        """Look at what is in force and at the target; returns digests of tied parameters."""
        pipeline_state, target = self.pipeline_state, self.target
        assert target is not None
        pipeline_state.check_static("switch")
        pipeline_state.passes.read_model()
        builder = pipeline_state.mover.builder
        if target.model not in (None, pipeline_state.mover.owned.model):
            builder = replace(builder, model=target.model)
            # the same parameters in the modules of another model, which runs them from then on
            self._new_owner = Ownership(target.model)
        builder.check_map(target.stage_map, target.rank_assignment.grid)
        config = replace(builder.config, microbatches=target.microbatches)
        self._schedule = builder.schedule(target.stage_map, target.durations, config)
        if pipeline_state.passes.progress.parts:
            raise SpecError("an update is under way: switch after step(update=True)")
        pipeline_state.check_free()
        owners = pipeline_state.passes.owners
        # with zero 2 and 3 all holders have other shards, so there are no copies to compare
        self._ties = ties_of(pipeline_state.mover.owned) if owners.zero < 2 else ()
        # moments of one owner have no copies either
        state = pipeline_state.mover.optimizers.state() if not owners.zero else {}
        return tie_digests(self._ties, pipeline_state.now.stage_map, pipeline_state.mover.groups.rank, state)

    def compare(self, votes: Sequence[Vote]) -> None:
        self.on_votes([vote.more for vote in votes])
        refuse_against(votes, self.whole)
        refuse_untied(
            self._ties,
            self.pipeline_state.now.stage_map,
            self.pipeline_state.mover.groups.grid,
            [vote.ties for vote in votes],
        )
        self.pipeline_state.compare([vote.copies for vote in votes])
        refuse_unmovable(votes, self.whole)
        self._ready = all(vote.ready for vote in votes)
        self._numbers = dict[str, Any]()
        # the lowest process's numbers are written last, so they hold
        for vote in reversed(votes):
            self._numbers.update(vote.numbers)

    def route_schedule(self, carrier: Collective) -> RouteSchedule:
        if self._ready and self.prepared.route is not None:
            return self.prepared.route
        assert self.target is not None
        rows = spec_rows(specs_of(self._held))
        every = gather_json(rows, carrier, Operation("describing state"))
        return self.pipeline_state.route_schedule(every, self.target, carrier.rank)

    def prepare(self, route_schedule: RouteSchedule) -> None:
        pipeline_state, target = self.pipeline_state, self.target
        assert target is not None
        # the optimizers have used them
        pipeline_state.passes.drop_gradients()
        if pipeline_state.now.executor is not None:
            pipeline_state.now.executor.rest()
        boxes = {
            piece.name: piece.box for piece in route_schedule.route.after.on(pipeline_state.mover.groups.world.rank)
        }
        self._to = pipeline_state.going(
            target, route_schedule.route.space, new_owner=self._new_owner, schedule=self._schedule
        )
        self._built = pipeline_state.build(self._to, boxes)

    def state(self, pieces: Sequence[Piece]) -> State:
        assert isinstance(self._held, Held)
        return {piece: self._held.tensors[piece.name] for piece in pieces}

    def beside(self, pieces: Sequence[Piece]) -> Sequence[Tensor]:
        assert isinstance(self._held, Held)
        moving = {piece.name for piece in pieces}
        return self.pipeline_state.beside([t for name, t in self._held.tensors.items() if name not in moving])

    def assemble(self, moved: Moved) -> Assignments:
        change = self.pipeline_state.change(self._to, self._built, moved.state, self._numbers)
        return self.pipeline_state.assignments(self._to, self._built, change)

    def drop(self) -> None:
        self.pipeline_state.drop()


def switch(move: LayoutMove, carrier: Collective, then: Assignments = ()) -> Switched:
    """Take a pipeline to another layout; collective over all processes, spare ones too.

    Args:
        move: The move, made alike on all processes.
        carrier: Communicator that brings the state; see `run`.
        then: Assignments that follow the move's own.

    Returns:
        What the move took on this process.

    Raises:
        TransitionError: The move failed; see `transaction.run`, which has all errors.
    """
    with move.pipeline_state.during("switch before step"):
        return run(move, world=move.pipeline_state.mover.groups.world, carrier=carrier, then=then)
