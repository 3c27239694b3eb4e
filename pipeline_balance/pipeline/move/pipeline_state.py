"""The training state of a whole pipeline, and the places that processes have in it.

Shape legend: N processes, R replicas, P pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from pipeline_balance.pipeline.model.layers import PipelineModel
from pipeline_balance.pipeline.model.ownership import Ownership, check_free, digest_of
from pipeline_balance.pipeline.move.export import root_state
from pipeline_balance.pipeline.move.stage_map import Change, StateMover
from pipeline_balance.pipeline.move.state import (
    Held,
    Item,
    base_name,
    items,
    space_of,
    spec_rows,
)
from pipeline_balance.pipeline.move.transaction import Assignments
from pipeline_balance.pipeline.run.agreement import from_all, refuse_where
from pipeline_balance.pipeline.run.passes import Passes
from pipeline_balance.pipeline.run.replicas import refuse_apart
from pipeline_balance.pipeline.run.stages import PipelineConfig, RankAssignment, StageBuilder, Stages
from pipeline_balance.pipeline.run.zero1 import Owners
from pipeline_balance.schedules.actions import Schedule
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError, TransitionError
from prophet.ranks.operation import Operation
from prophet.state.layout import Layout, Piece, layout_from, whole_tensors
from prophet.state.route import route
from prophet.state.route_schedule import RouteSchedule
from prophet.state.space import Box, Space
from prophet.state.transition import State, transition


@dataclass(frozen=True, kw_only=True)
class TrainingLayout:
    """Who runs what: places of processes, the stage map, who updates which tensor, microbatches of a replica.

    `model` runs the units; it is of the same modules as the one in force, which None leaves as it is. `nodes` [N] are
    the processes' nodes, as routes take them. `durations` are the stages' expected seconds, None where nobody knows.
    """

    rank_assignment: RankAssignment
    stage_map: StageMap
    owners: Owners
    microbatches: int
    model: PipelineModel | None = None
    nodes: Sequence[int] | None = None
    durations: Durations | None = None


@dataclass(frozen=True, kw_only=True)
class Going:
    """A way from what is in force to `target`, with the `space` of the state, on one process.

    `place` is its pipeline rank in the target, `config` how the pipeline trains there. `new_owner` is what the mover
    owns there, where another model runs the units. `schedule` is what ranks have agreed to run; None asks for it.
    """

    target: TrainingLayout
    space: Space
    place: int
    config: PipelineConfig
    new_owner: Ownership | None = None
    schedule: Schedule | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that this process runs there."""
        return self.target.stage_map.layers_on(self.place)

    def updates(self, numbers: Mapping[str, Any], process: int) -> dict[str, Any]:
        """Of these plain numbers, those of parameters that a process updates there."""
        owners = self.target.owners
        return {n: value for n, value in numbers.items() if process in owners.updaters(base_name(n), self.place)}


@dataclass(frozen=True, kw_only=True)
class Built:
    """The stages of a target, made on the side; of `model`'s units, whose parameters are `owned`. None: as now."""

    stages: Stages
    owned: Ownership | None = None
    model: PipelineModel | None = None


@dataclass
class PipelineState:
    """The training state of a pipeline: what is held, where it lies, and how it goes elsewhere or into files.

    `mover` has the pipeline's parts, `passes` what it has under way.
    """

    mover: StateMover
    passes: Passes
    moves_experts = False
    """Whether it takes along what replicas share of experts."""

    @property
    def now(self) -> Stages:
        """The stages in force."""
        return self.passes.now

    def in_force(self) -> TrainingLayout:
        """Who runs what now."""
        given: dict[str, Any] = {"rank_assignment": self.mover.groups.rank_assignment, "stage_map": self.now.stage_map}
        return TrainingLayout(owners=self.passes.owners, microbatches=self.mover.builder.config.microbatches, **given)

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

    def route_schedule(self, every: Sequence[Sequence[Any]], target: TrainingLayout, rank: int) -> RouteSchedule:
        """The route from what `every` process says it holds (`spec_rows`) to `target`; in any thread."""
        space, before = self.held_by(every)
        return RouteSchedule(route(before, self.layout(space, target, len(every)), nodes=target.nodes), rank)

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

    def layout(self, space: Space, target: TrainingLayout | None, processes: int) -> Layout:
        """Who holds what in `target`; with None, what is in force."""
        tied = self.mover.owned.tied()
        if target is not None:
            return layout_over(
                space, target.rank_assignment.grid.rows, target.stage_map, target.owners, tied, processes
            )
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

    def assignments(self, to: Going, built: Built, change: Change) -> Assignments:
        """What puts `built` in force with its state; `change` also has the modules, where they are other ones."""
        mover, passes = self.mover, self.passes

        def model() -> None:
            if change.owned is not None:
                mover.owned.become(change.owned)
                mover.builder.model = mover.owned.model

        def train() -> None:
            mover.builder.config = to.config

        return [
            change.make,
            model,
            train,
            lambda: mover.groups.assign(to.target.rank_assignment),
            lambda: passes.switch(to.target.owners),
            lambda: passes.go_on(built.stages),
        ]

    def numbers_to_vote(self, held: Held) -> dict[str, Any]:
        """The plain numbers that this process tells all others: those of parameters that it updates."""
        groups, owners = self.mover.groups, self.passes.owners
        here, rank = groups.world.rank, groups.rank
        return {n: v for n, v in held.scalars.items() if here in owners.updaters(base_name(n), rank)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of all parameters and buffers."""
        owned = self.mover.owned
        found = {name: tuple(p.shape) for name, p in owned.parameters.items()}
        return found | {name: tuple(b.tensor.shape) for name, b in owned.buffers.items()}

    def going(self, target: TrainingLayout, space: Space, **more: Any) -> Going:
        """The way to `target` on this process; `more` is the rest of `Going`."""
        config = replace(self.mover.builder.config, microbatches=target.microbatches)
        place = target.rank_assignment.grid.pipeline_rank_of(self.mover.groups.world.rank)
        return Going(**{"target": target, "space": space, "place": place, "config": config, **more})

    def build(self, to: Going, boxes: Mapping[str, Box]) -> Built:
        """The new stages, made on the side with all that needs no values; `boxes` are of the state that comes here.

        Raises what is wrong on this process.
        """
        mover = self.mover
        mover.check_put(mover.owned.parameters)
        builder = mover.builder if to.new_owner is None else replace(mover.builder, model=to.new_owner.model)
        return Built(stages=self._stages(builder, to))

    def _stages(self, builder: StageBuilder, to: Going) -> Stages:
        given: dict[str, Any] = {"rank": to.place, "config": to.config, "schedule": to.schedule}
        return builder.build(to.target.stage_map, to.target.durations, **given)

    def change(self, to: Going, built: Built, state: State, numbers: Mapping[str, Any]) -> Change:
        """The assignments that put the state in its place, all checked."""
        return self.mover.change(to.layers, state, to.updates(numbers, self.mover.groups.world.rank), to.new_owner)

    def beside(self, others: list[Tensor]) -> list[Tensor]:
        """What is given up with the state, and does not move: `others`, which copies have elsewhere, and padding."""
        return others

    def drop(self) -> None:
        """Forget the state that was lost: what has it goes to `meta`, so that using it is an error."""
        self.mover.drop()

    def whole_state(self, rank: int, state_dict_of: Callable[[nn.Module], dict[str, Any]]) -> dict[str, Tensor]:
        """What a copy of the unsplit model has `state_dict_of` of its state, in the host's memory of process `rank`;
        collective.

        Empty elsewhere. Raises `SpecError` on all processes where one cannot tell its state, or copies differ.
        """
        with self.during("collecting the model before step"):
            return self._whole_state(rank, state_dict_of)

    def _whole_state(self, rank: int, state_dict_of: Callable[[nn.Module], dict[str, Any]]) -> dict[str, Tensor]:
        collective, kept = self.mover.groups.world, [Held()]

        def described() -> list[Any]:
            if not 0 <= rank < collective.size:
                raise SpecError(f"the model is to be collected on rank {rank} of {collective.size}")
            self.passes.read_model()
            items = self.items()
            if not isinstance(items, str):  # whatever an optimizer keeps, the model has a state_dict
                items = [item for item in items if item.kind in ("parameter", "buffer")]
            found = self.described(items)
            if isinstance(found, str):
                raise SpecError(found)
            kept[0] = found
            return [rank, spec_rows(found.specs)]

        def agree(call: Callable[[], Any]) -> list[Any]:
            return from_all(call, collective, self.mover.device, Operation("collecting the model"))

        every = agree(described)
        refuse_where([to for to, _ in every], "collect the model on another rank")
        space = space_of([row for _, rows in every for row in rows])
        before, here = self.layout(space, None, collective.size), collective.rank
        refuse_copies_apart(agree(lambda: copies(before, here, kept[0])))
        after = layout_from(space, collective.size, {rank: [(t.name, t.box) for t in space.tensors]})
        moved = transition(
            route(before, after),
            {piece: kept[0].tensors[piece.name] for piece in before.pieces[here]},
            collective,
            budget_bytes=self.mover.budget_bytes,
            device=self.mover.device,
        )
        if here != rank:
            return {}
        # which training goes on to change
        memory_in_use = {t.untyped_storage().data_ptr() for t in kept[0].tensors.values()}
        found = {
            piece.name: tensor.clone() if tensor.untyped_storage().data_ptr() in memory_in_use else tensor
            for piece, tensor in moved.state.items()
        }
        return root_state(self.whole, found, self.unsplit, state_dict_of)

    @property
    def whole(self) -> Ownership:
        """The parameters of the unsplit model."""
        return self.mover.owned

    def unsplit(self, root: nn.Module) -> None:
        """Make a copy of the root say all of the state, where modules hold parts of it."""


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


def copies(layout: Layout, rank: int, held: Held) -> dict[str, int]:
    """Digests of what this process has, and others too, by piece."""
    table, names = layout.table, layout.space.tensors
    holders = np.diff(table.start)
    shared = (int(k) for k in table.on(rank) if holders[k] > 1)
    pieces = (Piece(names[int(table.tensor[k])].name, table.box(k)) for k in shared)
    return {str(piece): digest_of([("", held.tensors[piece.name])]) for piece in pieces}


def refuse_copies_apart(every: Sequence[Mapping[str, int]]) -> None:
    """Raise `SpecError` where the `copies` of something differ."""
    holders: dict[str, dict[int, dict[str, int]]] = {}
    for rank, row in enumerate(every):
        for piece, digest in row.items():
            name = piece.partition("[")[0]
            holders.setdefault(piece, {})[rank] = {name: digest}
    for column in holders.values():
        refuse_apart(column)
