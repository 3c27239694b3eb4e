"""Moving a whole pipeline to other processes: other stages, other replicas, other owners of the optimizer's state.

`rebuild` moves layers within every replica. Here all processes move at once, from the places they have to the places
that others are to have. Everything that can fail is done on the side. Then the processes decide once, in the store of
their process group, and what is left are assignments. Until that decision the state from before is whole and in force.

Shape legend: N processes, R replicas, P pipeline ranks.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from pipeline_balance.pipeline.agreement import refuse_where
from pipeline_balance.pipeline.model import PipelineModel
from pipeline_balance.pipeline.owners import Owners
from pipeline_balance.pipeline.ownership import Ownership, check_free
from pipeline_balance.pipeline.passes import Passes
from pipeline_balance.pipeline.rebuild import WHOLE, Change, StateMover
from pipeline_balance.pipeline.stages import PipelineConfig, Seats, Stages
from pipeline_balance.pipeline.ties import Tie, refuse_untied, tie_digests, ties_of
from pipeline_balance.pipeline.training_state import (
    Held,
    Item,
    base_name,
    gather_json,
    in_words,
    items,
    space_of,
    spec_rows,
)
from pipeline_balance.schedules.actions import Schedule
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError, StateLost, TransitionError
from prophet.ranks.collective import Collective, Operation
from prophet.state.itinerary import Itinerary
from prophet.state.layout import Layout, whole_tensors
from prophet.state.route import Route, route
from prophet.state.space import Box, Space, TensorSpec
from prophet.state.transition import Mode, Moved, State, transition

DECISION = Operation("deciding on a switch")
LOST = "neither the old state nor the new one is whole"


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


@dataclass(frozen=True, kw_only=True)
class Way:
    """A route that was found ahead, and the description of this process's state that it holds for."""

    specs: tuple[TensorSpec, ...]
    itinerary: Itinerary

    @property
    def route(self) -> Route:
        return self.itinerary.route


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What this process holds, and what all of them have agreed on before a switch, which they call `name`.

    `way` is None where it has to be found. `numbers` are the plain ones that travel in words: of the lowest process
    that updates their parameter.
    """

    held: Held
    way: Way | None
    numbers: Mapping[str, Any]
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Switched:
    """What a switch took.

    `seconds` is how long this process was held up. `link_bytes` has the bytes of the state by sending and receiving
    process, the same on all of them; `messages` those that this one has sent. `peak_bytes` is the most that state and
    buffers took here: the old state, what is new, the buffers of the move.
    """

    seconds: float
    link_bytes: Mapping[tuple[int, int], int]
    messages: int
    peak_bytes: int


@dataclass
class Reseater:
    """Takes a pipeline from one arrangement to another.

    `mover` has its parts, `passes` what it has under way, `now` what is in force. `mode` is how state moves.
    """

    mover: StateMover
    passes: Passes
    now: Stages
    mode: Mode = field(default="safe", init=False)
    becomes: Ownership | None = field(default=None, init=False)
    """What `mover` is to own, where another model runs the units; `check` reads it."""
    schedule: Schedule | None = field(default=None, init=False)
    """What ranks have agreed to run in the new stages; without an agreement, building asks for it."""
    moves_experts = False
    """Whether it takes along what replicas share of experts."""

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

    def way(self, specs: Sequence[TensorSpec], target: Arrangement, collective: Collective) -> Way:
        """The route from what is in force to `target`; collective."""
        every = gather_json(spec_rows(specs), collective, self.mover.device, Operation("describing state"))
        return self.way_from(every, specs, target, collective.rank)

    def way_from(
        self, every: Sequence[Sequence[Any]], specs: Sequence[TensorSpec], target: Arrangement, rank: int
    ) -> Way:
        """The same from what `every` process says it holds (`spec_rows`); in any thread."""
        space, before = self.held_by(every)
        after = self.layout(space, target, len(every))
        return Way(specs=tuple(specs), itinerary=Itinerary(route(before, after, nodes=target.nodes), rank))

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

    def agree(
        self,
        words: Mapping[str, Any],
        target: Arrangement | None,
        way: Way | None,
        told: Callable[[], Any],
        heard: Callable[[list[Any]], None],
    ) -> Agreed:
        """Raise `SpecError` on all processes unless all are between updates and say the same `words`; collective.

        Raises `TransitionError` where tied parameters have come apart, or a process's state cannot be moved. Nothing
        has been touched then. All goes in one message, with what the caller has `told`; the caller has `heard` of that
        first, and may raise. It must where a process has no `target`. `way` was found ahead.
        """
        if not self.moves_experts:
            self.passes.experts.check_static("switch")
        groups, now = self.mover.groups, self.now.stage_map
        ties: tuple[Tie, ...] = ()

        def read() -> dict[str, tuple[int, int]]:
            nonlocal ties
            if target is None:
                return {}
            self.passes.read_model()
            builder = self.mover.builder
            if target.model not in (None, self.mover.owned.model):
                builder = replace(builder, model=target.model)
                self.becomes = Ownership(target.model)
            builder.check_map(target.stage_map, target.seats.grid)
            self.schedule = builder.schedule(target.stage_map, target.durations, self._config(target))
            if self.passes.progress.parts:
                raise SpecError("an update is under way: switch after step(update=True)")
            self.check_free()
            ties = ties_of(self.mover.owned) if self.passes.owners.zero < 2 else ()  # else all have other shards
            # moments of one owner are compared with nobody's
            state = self.mover.optimizers.state() if not self.passes.owners.zero else {}
            return tie_digests(ties, now, groups.rank, state)

        said = {"told": told(), "ties": self.mover.attempt(read), "words": {**words, "mode": self.mode}}
        held = self.describe()
        specs = tuple(held.specs) if isinstance(held, Held) else ()
        said |= {
            "schedule": self.mover.builder.number(self.schedule) if self.schedule is not None else 0,
            "copies": self.copies(),
            "problem": held if isinstance(held, str) else "",
            "numbers": self.told_numbers(held) if isinstance(held, Held) else {},
            "fits": way is not None and way.specs == specs,
            "name": secrets.token_hex(8),
        }
        every = gather_json(said, groups.world, self.mover.device, Operation("agreeing on a switch"))
        heard([row["told"] for row in every])
        refused = in_words([row["ties"] if isinstance(row["ties"], str) else "" for row in every])
        if refused:
            raise SpecError(f"{refused}; {WHOLE}")
        for what, value in every[0]["words"].items():
            differ = [r for r, row in enumerate(every) if row["words"][what] != value]
            if differ:
                raise SpecError(f"ranks {differ} have another {what} than rank 0 ({value}); {WHOLE}")
        refuse_where([row["schedule"] for row in every], "follow another schedule")
        refuse_untied(ties, now, groups.grid, [row["ties"] for row in every])
        self.compare([row["copies"] for row in every])
        problems = in_words([row["problem"] for row in every])
        if problems:
            raise TransitionError(_ended(problems))
        assert isinstance(held, Held)
        numbers: dict[str, Any] = {}
        for row in reversed(every):
            numbers.update(row["numbers"])
        fits = all(row["fits"] for row in every)
        return Agreed(held=held, way=way if fits else None, numbers=numbers, name=every[0]["name"])

    def check_free(self) -> None:
        """Raise `SpecError` where something holds what a switch replaces, and would go on with the old values."""
        check_free(self.mover.owned.parameters)

    def copies(self) -> dict[str, Any]:
        """What this process says of tensors that others have too, besides replicas and ties."""
        return {}

    def compare(self, every: Sequence[Mapping[str, Any]]) -> None:
        """Raise `SpecError` where the `copies` of all processes differ."""

    def move(self, target: Arrangement, collective: Collective, agreed: Agreed) -> tuple[Stages, Switched]:
        """Go to `target`; `collective` over all processes carries the state, and nothing else uses it meanwhile.

        Whatever can be made and checked beforehand is. Raises `TransitionError` on all processes, with everything as it
        was, or on none. In place, what fails on the way is a `StateLost` on all of them, and no process has parameters
        any more.
        """
        began = time.perf_counter()
        mover, rank, held = self.mover, collective.rank, agreed.held
        self.passes.drop_gradients()  # they were used
        if self.now.executor is not None:
            self.now.executor.rest()
        config = self._config(target)
        place = target.seats.grid.pipeline_rank_of(rank)
        problem, lost = "", False
        links: Mapping[tuple[int, int], int] = {}
        done: tuple[Stages, Change] | None = None

        def conclude(state: State, wrong: str) -> None:
            nonlocal lost
            lost = self.mode == "in-place"  # from here on the new state is the only one
            raise_own(state, wrong)

        try:
            way = self._agreed_way(agreed, target, collective)
            boxes = {piece.name: piece.box for piece in way.route.after.on(rank)}
            ready = functools.partial(self._ready, boxes, target, place, config)
            found: Stages | str = mover.attempt(ready)
            pieces = way.route.before.on(rank)
            moving = {piece.name for piece in pieces}
            moved = transition(
                way.route,
                {piece: held.tensors[piece.name] for piece in pieces},
                collective,
                budget_bytes=mover.budget_bytes,
                mode=self.mode,
                device=mover.device,
                allocate=mover.allocate,
                beside=self._beside([t for name, t in held.tensors.items() if name not in moving]),
                problem=found if isinstance(found, str) else "",
                conclude=conclude,
                ahead=way.itinerary,
            )
            assert not isinstance(found, str)
            links = way.route.link_bytes
            done = found, self._change(target, moved, agreed.numbers, place)
        except Exception as error:
            lost = lost or isinstance(error, StateLost)
            problem = f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
        against = collective.decide(DECISION, agreed.name, ready=done is not None, device=mover.device)
        if against or done is None:
            if lost:
                self.drop()
                raise StateLost(_ended(problem or against, LOST)) from None
            raise TransitionError(_ended(problem or against)) from None
        stages, change = done
        self.put_in_force(target, change, config)
        return stages, Switched(
            seconds=time.perf_counter() - began,
            link_bytes=links,
            messages=moved.messages,
            peak_bytes=moved.peak_bytes,
        )

    def put_in_force(self, target: Arrangement, change: Change, config: Any) -> None:
        """What was assembled is used from here on: assignments, which cannot fail."""
        mover = self.mover
        change.make()  # also the modules, where they are other ones
        if change.owned is not None:
            mover.owned.become(change.owned)
            mover.builder.model = mover.owned.model
        mover.builder.config = config
        mover.groups.sit(target.seats)
        self.passes.reseat(target.owners)

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

    def _agreed_way(self, agreed: Agreed, target: Arrangement, collective: Collective) -> Way:
        """The route: as it was found ahead, where every process's state still has that shape."""
        return agreed.way if agreed.way is not None else self.way(agreed.held.specs, target, collective)


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


def raise_own(state: State, problem: str) -> None:
    """How a move concludes whose ranks decide afterwards on all of it: each raises its own `problem`, if it has any."""
    if problem:
        raise TransitionError(problem)


def _ended(said: str, after: str = WHOLE) -> str:
    return said if after in said else f"{said}; {after}"
