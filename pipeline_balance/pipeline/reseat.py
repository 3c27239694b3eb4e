"""Moving a whole pipeline to other processes: other stages, other replicas, other owners of the optimizer's state.

`rebuild` moves layers within every replica. Here all processes move at once, from the places they have to the places
that others are to have.

Shape legend: N processes, R replicas, P pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from pipeline_balance.pipeline.agreement import from_all, words_of
from pipeline_balance.pipeline.export import root_state
from pipeline_balance.pipeline.model import PipelineModel
from pipeline_balance.pipeline.move.transaction import Assignments, Move, Prepared, Switched, run
from pipeline_balance.pipeline.move.votes import Vote, refuse_against, refuse_unmovable
from pipeline_balance.pipeline.owners import Owners
from pipeline_balance.pipeline.ownership import Ownership, check_free
from pipeline_balance.pipeline.passes import Passes
from pipeline_balance.pipeline.rebuild import Change, StateMover
from pipeline_balance.pipeline.stages import PipelineConfig, Seats, Stages
from pipeline_balance.pipeline.ties import Tie, refuse_untied, tie_digests, ties_of
from pipeline_balance.pipeline.training_state import (
    Held,
    Item,
    base_name,
    gather_json,
    items,
    space_of,
    spec_rows,
    specs_of,
)
from pipeline_balance.schedules.actions import Schedule
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError, TransitionError
from prophet.ranks.collective import Collective, Operation
from prophet.state.itinerary import Itinerary
from prophet.state.layout import Layout, Piece, layout_from, whole_tensors
from prophet.state.route import route
from prophet.state.space import Box, Space
from prophet.state.transition import Mode, Moved, State, transition


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Who runs what: places of processes, the stage map, who updates which tensor, microbatches of a replica.

    `model` runs the units; it is of the same modules as the one in force, which None leaves as it is. `nodes` [N] are
    the processes' nodes, as routes take them. `durations` are the stages' expected seconds, None where nobody knows.
    """

    seats: Seats
    stage_map: StageMap
    owners: Owners
    microbatches: int
    model: PipelineModel | None = None
    nodes: Sequence[int] | None = None
    durations: Durations | None = None


@dataclass
class Reseater:
    """Takes a pipeline from one arrangement to another. `mover` has its parts, `passes` what it has under way."""

    mover: StateMover
    passes: Passes
    becomes: Ownership | None = field(default=None, init=False)
    """What `mover` is to own, where another model runs the units; `check` reads it."""
    schedule: Schedule | None = field(default=None, init=False)
    """What ranks have agreed to run in the new stages; without an agreement, building asks for it."""
    space: Space = field(default=Space(()), init=False)
    """Of the state on its way."""
    moves_experts = False
    """Whether it takes along what replicas share of experts."""

    @property
    def now(self) -> Stages:
        """The stages in force."""
        return self.passes.now

    def in_force(self) -> Arrangement:
        """Who runs what now."""
        given: dict[str, Any] = {"seats": self.mover.groups.seats, "stage_map": self.now.stage_map}
        return Arrangement(owners=self.passes.owners, microbatches=self.mover.builder.config.microbatches, **given)

    def during(self, what: str) -> AbstractContextManager[None]:
        """What all processes do together before the next step: see `Failures.during`."""
        return self.mover.groups.failures.during(f"{what} {self.passes.progress.updates}", self.now.stage_map)

    def check_static(self, what: str) -> None:
        """Raise `SpecError` where layers share experts that this does not take along."""
        if not self.moves_experts:
            self.passes.experts.check_static(what)

    def items(self) -> list[Item] | str:
        """This process's state without gradients as it was found, or in words why it cannot be moved."""
        units = self.now.stage_map.layers_on(self.mover.groups.rank)
        found: list[Item] | str = self.mover.attempt(
            lambda: items(self.mover.owned, self.mover.optimizers, units, gradients=False)
        )
        return found

    def described(self, found: list[Item] | str) -> Held | str:
        """These with their description, or in words why they cannot be moved; in any thread."""
        held: Held | str = found if isinstance(found, str) else self.mover.attempt(lambda: Held.of(found))
        return held

    def describe(self) -> Held | str:
        """This process's state without gradients, or in words why it cannot be moved."""
        return self.described(self.items())

    def way(self, every: Sequence[Sequence[Any]], target: Arrangement, rank: int) -> Itinerary:
        """The route from what `every` process says it holds (`spec_rows`) to `target`; in any thread."""
        space, before = self.held_by(every)
        return Itinerary(route(before, self.layout(space, target, len(every)), nodes=target.nodes), rank)

    def held_by(self, every: Sequence[Sequence[Any]]) -> tuple[Space, Layout]:
        """The space of what all processes say they hold (`spec_rows`), and who holds what in force.

        Raises `TransitionError` where a process lacks something that it should hold.
        """
        space = space_of([row for rows in every for row in rows])
        before = self.layout(space, None, len(every))
        for rank, described in enumerate(every):
            lacks = before.names_on(rank) - {row[0] for row in described}
            if lacks:
                raise TransitionError(
                    f"rank {rank} does not keep {min(lacks)}, which others do: keep it on every replica"
                )
        return space, before

    def layout(self, space: Space, target: Arrangement | None, processes: int) -> Layout:
        """Who holds what in `target`; with None, what is in force."""
        tied = self.mover.owned.tied()
        if target is not None:
            return layout_over(space, target.seats.grid.rows, target.stage_map, target.owners, tied, processes)
        grid = self.mover.groups.grid
        return layout_over(space, grid.rows, self.now.stage_map, self.passes.owners, tied, processes, first=True)

    def check_free(self) -> None:
        """Raise `SpecError` where something holds what a switch replaces, and would go on with the old values."""
        check_free(self.mover.owned.parameters)

    def copies(self) -> dict[str, Any]:
        """What this process says of tensors that others have too, besides replicas and ties."""
        return {}

    def compare(self, every: Sequence[Mapping[str, Any]]) -> None:
        """Raise `SpecError` where the `copies` of all processes differ."""

    def assignments(self, target: Arrangement, stages: Stages, change: Change, config: PipelineConfig) -> Assignments:
        """What puts `stages` in force with their state; `change` also has the modules, where they are other ones."""
        mover = self.mover

        def model() -> None:
            if change.owned is not None:
                mover.owned.become(change.owned)
                mover.builder.model = mover.owned.model

        def train() -> None:
            mover.builder.config = config

        def sit() -> None:
            mover.groups.sit(target.seats)

        reseat, go_on = self.passes.reseat, self.passes.go_on
        return [change.make, model, train, sit, lambda: reseat(target.owners), lambda: go_on(stages)]

    def told_numbers(self, held: Held) -> dict[str, Any]:
        """The plain numbers that this process tells all others: those of parameters that it updates."""
        groups, owners = self.mover.groups, self.passes.owners
        here, rank = groups.world.rank, groups.rank
        return {n: v for n, v in held.scalars.items() if here in owners.updaters(base_name(n), rank)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of all parameters and buffers."""
        owned = self.mover.owned
        found = {name: tuple(p.shape) for name, p in owned.parameters.items()}
        return found | {name: tuple(b.tensor.shape) for name, b in owned.buffers.items()}

    def filled(
        self, target: Arrangement, space: Space, state: State, scalars: Mapping[str, Any], config: Any
    ) -> tuple[Stages, Change]:
        """The stages of `target` with a state that has come from elsewhere, all checked; nothing is in force yet."""
        self.space = space
        came = Moved(
            state=dict(state),
            sent_bytes=0,
            received_bytes=0,
            buffer_bytes=0,
            new_state_bytes=0,
            peak_bytes=0,
            messages=0,
            seconds=0,
        )
        place = target.seats.grid.pipeline_rank_of(self.mover.groups.world.rank)
        stages = self._ready({piece.name: piece.box for piece in state}, target, place, config)
        return stages, self._change(target, came, scalars, place)

    def _ready(self, boxes: Mapping[str, Box], target: Arrangement, place: int, config: Any) -> Stages:
        """The new stages, made on the side with all that needs no values; `boxes` are of the state that comes here.

        Raises what is wrong on this process.
        """
        mover = self.mover
        mover.check_put(mover.owned.parameters)
        builder = mover.builder if self.becomes is None else replace(mover.builder, model=self.becomes.model)
        return builder.build(target.stage_map, target.durations, rank=place, config=config, schedule=self.schedule)

    def _config(self, target: Arrangement) -> PipelineConfig:
        """How the pipeline trains in `target`."""
        return replace(self.mover.builder.config, microbatches=target.microbatches)

    def _beside(self, others: list[Tensor]) -> list[Tensor]:
        """What is given up with the state, and does not move: `others`, which copies have elsewhere, and padding."""
        return others

    def drop(self) -> None:
        """Forget the state that was lost: what has it goes to `meta`, so that using it is an error."""
        self.mover.drop()

    def _change(self, target: Arrangement, moved: Moved, scalars: Mapping[str, Any], place: int) -> Change:
        """The assignments that put the state in its place, all checked."""
        rank = self.mover.groups.world.rank

        def updates(name: str) -> bool:
            return rank in target.owners.updaters(name, place)

        mine = {name: value for name, value in scalars.items() if updates(base_name(name))}
        return self.mover.change(target.stage_map.layers_on(place), moved.state, mine, self.becomes)

    def whole_state(
        self, collective: Collective, rank: int, said: Callable[[nn.Module], dict[str, Any]]
    ) -> dict[str, Tensor]:
        """The unsplit model's `state_dict` in the host's memory of process `rank`, empty elsewhere; collective.

        `said` is how a copy of the whole model says it.

        Raises `SpecError` on all processes where one cannot tell its state.
        """
        kept: list[Held] = []

        def described() -> list[Any]:
            self.passes.read_model()
            found = self.describe()
            if isinstance(found, str):
                raise SpecError(found)
            kept.append(found)
            return spec_rows([spec for spec in found.specs if spec.kind != "optimizer"])

        every = from_all(described, collective, self.mover.device, Operation("collecting the model"))
        space = space_of([row for said in every for row in said])
        before = self.layout(space, None, collective.size)
        after = layout_from(space, collective.size, {rank: [(t.name, t.box) for t in space.tensors]})
        moved = transition(
            route(before, after),
            {piece: kept[0].tensors[piece.name] for piece in before.pieces[collective.rank]},
            collective,
            budget_bytes=self.mover.budget_bytes,
            device=self.mover.device,
        )
        if collective.rank != rank:
            return {}
        found = {piece.name: tensor for piece, tensor in moved.state.items()}
        return root_state(self.mover.owned, found, self.unsplit, said)

    def unsplit(self, root: nn.Module) -> None:
        """Make a copy of the root say all of the state, where modules hold parts of it."""


@dataclass
class ArrangementMove(Move):
    """A pipeline goes to `target`, with the state that `how` knows; between updates.

    `words` must be the same on all processes, by what those do that differ. `told` is what the caller says besides; it
    has `heard` what all have told before anything else is compared, and may raise: it must where a process has no
    `target`. `prepared` is a route that was found ahead. What `compare` refuses: an update under way, other words, ties
    that have come apart (`SpecError`), state that cannot be moved (`TransitionError`). Gradients are dropped.
    """

    what = "a switch"

    how: Reseater
    target: Arrangement | None
    words: Mapping[str, Any]
    prepared: Prepared = field(default_factory=Prepared)
    told: Callable[[], Any] = lambda: None
    heard: Callable[[list[Any]], None] = lambda told: None
    mode: Mode = "safe"

    def __post_init__(self) -> None:
        mover = self.how.mover
        self.device, self.budget_bytes, self.allocate = mover.device, mover.budget_bytes, mover.allocate
        self._ties: tuple[Tie, ...] = ()

    def vote(self) -> Vote:
        how, refused, ties = self.how, "", dict[str, tuple[int, int]]()
        said = self.told()
        try:
            ties = self._read() if self.target is not None else {}
        except Exception as error:
            refused = words_of(error)
        self._held = held = how.describe()
        ready = self.prepared.route is not None and self.prepared.specs == specs_of(held)
        schedule = how.mover.builder.number(how.schedule) if how.schedule is not None else 0
        return Vote(
            alike={**self.words, "switch in another mode": self.mode, "follow another schedule": schedule},
            refused=refused,
            cannot=held if isinstance(held, str) else "",
            numbers=how.told_numbers(held) if isinstance(held, Held) else {},
            ready=ready,
            copies=how.copies(),
            ties=ties,
            more=said,
        )

    def _read(self) -> dict[str, tuple[int, int]]:
        """Look at what is in force and at the target; digests of tied parameters."""
        how, target = self.how, self.target
        assert target is not None
        how.check_static("switch")
        how.passes.read_model()
        builder = how.mover.builder
        if target.model not in (None, how.mover.owned.model):
            builder = replace(builder, model=target.model)
            how.becomes = Ownership(target.model)
        builder.check_map(target.stage_map, target.seats.grid)
        how.schedule = builder.schedule(target.stage_map, target.durations, how._config(target))
        if how.passes.progress.parts:
            raise SpecError("an update is under way: switch after step(update=True)")
        how.check_free()
        owners = how.passes.owners
        self._ties = ties_of(how.mover.owned) if owners.zero < 2 else ()  # else all have other shards
        state = how.mover.optimizers.state() if not owners.zero else {}  # moments of one owner have no copies
        return tie_digests(self._ties, how.now.stage_map, how.mover.groups.rank, state)

    def compare(self, votes: Sequence[Vote]) -> None:
        self.heard([vote.more for vote in votes])
        refuse_against(votes)
        refuse_untied(self._ties, self.how.now.stage_map, self.how.mover.groups.grid, [vote.ties for vote in votes])
        self.how.compare([vote.copies for vote in votes])
        refuse_unmovable(votes, self.whole)
        self._ready = all(vote.ready for vote in votes)
        self._numbers = dict[str, Any]()
        for vote in reversed(votes):
            self._numbers.update(vote.numbers)

    def way(self, carrier: Collective) -> Itinerary:
        if self._ready and self.prepared.route is not None:
            return self.prepared.route
        assert self.target is not None
        rows = spec_rows(specs_of(self._held))
        every = gather_json(rows, carrier, self.device, Operation("describing state"))
        return self.how.way(every, self.target, carrier.rank)

    def prepare(self, way: Itinerary) -> None:
        how, target = self.how, self.target
        assert target is not None
        how.passes.drop_gradients()  # they were used
        if how.now.executor is not None:
            how.now.executor.rest()
        rank = how.mover.groups.world.rank
        how.space = way.route.space
        self._place = target.seats.grid.pipeline_rank_of(rank)
        boxes = {piece.name: piece.box for piece in way.route.after.on(rank)}
        self._stages = how._ready(boxes, target, self._place, how._config(target))

    def state(self, pieces: Sequence[Piece]) -> State:
        assert isinstance(self._held, Held)
        return {piece: self._held.tensors[piece.name] for piece in pieces}

    def beside(self, pieces: Sequence[Piece]) -> Sequence[Tensor]:
        assert isinstance(self._held, Held)
        moving = {piece.name for piece in pieces}
        return self.how._beside([t for name, t in self._held.tensors.items() if name not in moving])

    def assemble(self, moved: Moved) -> Assignments:
        how, target = self.how, self.target
        assert target is not None
        change = how._change(target, moved, self._numbers, self._place)
        return how.assignments(target, self._stages, change, how._config(target))

    def drop(self) -> None:
        self.how.drop()


def switch(move: ArrangementMove, carrier: Collective, then: Assignments = ()) -> Switched:
    """Take a pipeline to another arrangement; collective over all processes, spare ones too. See `run` for errors."""
    with move.how.during("switch before step"):
        return run(move, world=move.how.mover.groups.world, carrier=carrier, then=then)


def layout_over(
    space: Space,
    rows: Sequence[Sequence[int]],
    stage_map: StageMap,
    owners: Owners,
    tied: Mapping[str, tuple[int, ...]],
    processes: int,
    *,
    first: bool = False,
) -> Layout:
    """Which process holds which whole tensor: `rows` [R][P] are the processes of every replica.

    What optimizers keep lives where its parameter is updated. With `first`, buffers count as the first replica's alone,
    since replicas may differ in them.
    """
    home = stage_map.assignment()
    holders: list[list[int]] = []
    for tensor in space.tensors:
        name = base_name(tensor.name)
        assert tensor.layer is not None
        holders.append([])
        for p in sorted({home[unit] for unit in tied.get(name, (tensor.layer,))}):
            column = tuple(row[p] for row in rows)
            if tensor.kind == "optimizer":
                column = owners.updaters(name, p)
            elif tensor.kind == "buffer" and first:
                column = column[:1]
            holders[-1] += column
    return whole_tensors(space, processes, holders)
