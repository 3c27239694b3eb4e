"""Moving a whole pipeline to other processes: other stages, other replicas, other owners of the optimizer's state.

`rebuild` moves layers within every replica. Here all processes move at once, from the places they have to the places
that others are to have. Everything that can fail is done on the side. Then the processes decide once, in the store of
their process group, and what is left are assignments. Until that decision the state from before is whole and in force.

Shape legend: N processes, R replicas, P pipeline ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from pipeline_balance.pipeline.model import PipelineModel
from pipeline_balance.pipeline.owners import Owners
from pipeline_balance.pipeline.ownership import Ownership
from pipeline_balance.pipeline.passes import Passes
from pipeline_balance.pipeline.rebuild import WHOLE, Change, StateMover
from pipeline_balance.pipeline.stages import Seats, Stages
from pipeline_balance.pipeline.ties import Tie, refuse_untied, tie_digests, ties_of
from pipeline_balance.pipeline.training_state import Held, base_name, collect, gather_json
from pipeline_balance.spec import StageMap
from prophet.errors import BudgetError, LayoutError, SpecError, StateLost, TransitionError
from prophet.ranks.collective import Collective, Operation
from prophet.state.layout import Layout, whole_tensors
from prophet.state.route import Route, route
from prophet.state.space import Space, TensorSpec
from prophet.state.transition import Mode, Moved, transition

DECISION = Operation("deciding on a switch")


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Who runs what: places of processes, the stage map, who updates which tensor, microbatches of a replica.

    `model` runs the units; it is of the same modules as the one in force, which None leaves as it is. `nodes` [N] are
    the processes' nodes, as routes take them.
    """

    seats: Seats
    stage_map: StageMap
    owners: Owners
    microbatches: int
    model: PipelineModel | None = None
    nodes: Sequence[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Way:
    """A route that was found ahead, and the description of this process's state that it holds for."""

    specs: tuple[TensorSpec, ...]
    route: Route


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
    moves_experts = False
    """Whether it takes along what replicas share of experts."""

    def describe(self) -> Held | str:
        """This process's state without gradients, or in words why it cannot be moved."""
        units = self.now.stage_map.layers_on(self.mover.groups.rank)
        held: Held | str = self.mover.attempt(
            lambda: collect(self.mover.owned, self.mover.optimizers, units, gradients=False)
        )
        return held

    def way(self, specs: Sequence[TensorSpec], target: Arrangement, collective: Collective) -> Way:
        """The route from what is in force to `target`; collective, in any thread."""
        rows = [[s.name, list(s.shape), s.dtype, s.kind, s.layer] for s in specs]
        every = gather_json(rows, collective, self.mover.device, Operation("describing state"))
        tensors = {row[0]: row for rows in every for row in rows}
        space = Space(
            tuple(
                TensorSpec(name=n, shape=tuple(shape), dtype=d, kind=k, layer=u)
                for n, shape, d, k, u in sorted(tensors.values(), key=lambda row: (row[4], row[0]))
            )
        )
        before = self.layout(space, None, collective.size)
        for rank, described in enumerate(every):
            lacks = {piece.name for piece in before.on(rank)} - {row[0] for row in described}
            if lacks:
                raise TransitionError(
                    f"rank {rank} does not keep {min(lacks)}, which others do: keep it on every replica"
                )
        after = self.layout(space, target, collective.size)
        return Way(specs=tuple(specs), route=route(before, after, nodes=target.nodes))

    def layout(self, space: Space, target: Arrangement | None, processes: int) -> Layout:
        """Who holds what in `target`; with None, what is in force."""
        tied = self.mover.owned.tied()
        if target is not None:
            return layout_over(space, target.seats.grid.rows, target.stage_map, target.owners, tied, processes)
        grid = self.mover.groups.grid
        return layout_over(space, grid.rows, self.now.stage_map, self.passes.owners, tied, processes, first=True)

    def check(self, words: Mapping[str, Any], target: Arrangement) -> None:
        """Raise `SpecError` on all processes unless all are between updates and say the same `words`; collective.

        Raises `TransitionError` where tied parameters have come apart.
        """
        if not self.moves_experts:
            self.passes.experts.check_static("switch")
        groups, now = self.mover.groups, self.now.stage_map
        ties: tuple[Tie, ...] = ()

        def read() -> dict[str, tuple[int, int]]:
            nonlocal ties
            self.passes.read_model()
            builder = self.mover.builder
            if target.model not in (None, self.mover.owned.model):
                builder = replace(builder, model=target.model)
                self.becomes = Ownership(target.model)
            builder.check_map(target.stage_map, target.seats.grid)
            if self.passes.progress.parts:
                raise SpecError("an update is under way: switch after step(update=True)")
            ties = ties_of(self.mover.owned) if self.passes.owners.zero < 2 else ()  # else all have other shards
            # moments of one owner are compared with nobody's
            state = self.mover.optimizers.state() if not self.passes.owners.zero else {}
            return tie_digests(ties, now, groups.rank, state)

        op = Operation("agreeing on a switch")
        said = [self.mover.attempt(read), {**words, "mode": self.mode}]
        every = gather_json(said, groups.world, self.mover.device, op)
        refused = [f"rank {r}: {said[0]}" for r, said in enumerate(every) if isinstance(said[0], str)]
        if refused:
            raise SpecError("; ".join(refused[:3]) + f"; {WHOLE}")
        for what, value in every[0][1].items():
            differ = [r for r, said in enumerate(every) if said[1][what] != value]
            if differ:
                raise SpecError(f"ranks {differ} have another {what} than rank 0 ({value}); {WHOLE}")
        refuse_untied(ties, now, groups.grid, [digests for digests, _ in every])

    def move(self, target: Arrangement, collective: Collective, way: Way | None) -> tuple[Stages, Switched]:
        """Go to `target`; `collective` over all processes carries the state, and nothing else uses it meanwhile.

        `way` was found ahead; it is used where every process's state still has that shape. Raises `TransitionError` on
        all processes, with everything as it was, or on none. In place, what fails on the way is a `StateLost` on all of
        them, and no process has parameters any more.
        """
        began = time.perf_counter()
        mover, rank = self.mover, collective.rank
        self.passes.drop_gradients()  # they were used
        if self.now.executor is not None:
            self.now.executor.rest()
        config = replace(mover.builder.config, microbatches=target.microbatches)
        place = target.seats.grid.pipeline_rank_of(rank)
        problem, beside_bytes, lost = "", 0, False
        links: dict[tuple[int, int], int] = {}
        done: tuple[Stages, Change] | None = None
        try:
            held = self.describe()
            way, scalars = self._agreed_way(held, target, collective, way)
            assert isinstance(held, Held)
            state = {piece: held.tensors[piece.name] for piece in way.route.before.on(rank)}
            beside_bytes = n_bytes(held.tensors.values()) - n_bytes(state.values())
            moved = transition(
                way.route,
                state,
                collective,
                budget_bytes=mover.budget_bytes,
                mode=self.mode,
                device=mover.device,
                allocate=mover.allocate,
            )
            lost = self.mode == "in-place"  # from here on the new state is the only one
            links = link_bytes(way.route)
            done = self._assembled(target, moved, scalars, place, config)
        except (TransitionError, BudgetError, LayoutError, RuntimeError, MemoryError) as error:
            lost = lost or isinstance(error, StateLost)
            problem = f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
        if not collective.decide(DECISION, ready=done is not None) or done is None:
            if lost:
                mover.drop()
                raise StateLost(problem or "another rank could not switch, and the state was moved in place") from None
            raise TransitionError(_ended(problem)) from None
        stages, change = done
        change.make()  # also the modules, where they are other ones
        if change.owned is not None:
            mover.owned.become(change.owned)
            mover.builder.model = mover.owned.model
        mover.builder.config = config
        mover.groups.sit(target.seats)
        self.passes.reseat(target.owners)
        return stages, Switched(
            seconds=time.perf_counter() - began,
            link_bytes=links,
            messages=moved.messages,
            peak_bytes=moved.peak_bytes + beside_bytes,
        )

    def _assembled(
        self, target: Arrangement, moved: Moved, scalars: Mapping[str, Any], place: int, config: Any
    ) -> tuple[Stages, Change]:
        """The new stages with the assignments that put the state in its place, all checked."""
        rank = self.mover.groups.world.rank

        def updates(name: str) -> bool:
            return rank in target.owners.updaters(name, place)

        mine = {name: value for name, value in scalars.items() if updates(base_name(name))}
        return self.mover.assemble(target.stage_map, moved.state, mine, rank=place, config=config, becomes=self.becomes)

    def _agreed_way(
        self, held: Held | str, target: Arrangement, collective: Collective, way: Way | None
    ) -> tuple[Way, dict[str, Any]]:
        """The route, and the plain numbers that travel in words: of the lowest process that updates their parameter."""
        specs = held.specs if isinstance(held, Held) else []
        groups, owners = self.mover.groups, self.passes.owners
        scalars = held.scalars.items() if isinstance(held, Held) else ()
        said = {
            "problem": held if isinstance(held, str) else "",
            "scalars": {n: v for n, v in scalars if groups.world.rank in owners.updaters(base_name(n), groups.rank)},
            "ready": way is not None and way.specs == tuple(specs),
        }
        every = gather_json(said, collective, self.mover.device, Operation("beginning a switch"))
        problems = [f"rank {r}: {row['problem']}" for r, row in enumerate(every) if row["problem"]]
        if problems:
            raise TransitionError("; ".join(problems[:3]))
        taken: dict[str, Any] = {}
        for row in reversed(every):
            taken.update(row["scalars"])
        if way is None or not all(row["ready"] for row in every):
            way = self.way(specs, target, collective)
        return way, taken


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


def n_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all of them."""
    return sum(t.numel() * t.element_size() for t in tensors)


def link_bytes(way: Route) -> dict[tuple[int, int], int]:
    """Bytes by sending and receiving process."""
    found = np.zeros((way.ranks, way.ranks), dtype=np.int64)
    np.add.at(found, (way.source, way.rows.destination), way.rows.n_bytes)
    return {(int(s), int(d)): int(found[s, d]) for s, d in np.argwhere(found)}


def _ended(problem: str) -> str:
    said = problem or "another rank could not switch"
    return said if WHOLE in said else f"{said}; {WHOLE}"
