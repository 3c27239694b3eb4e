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
    layout_over,
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
from prophet.state.layout import Layout, Piece, layout_from
from prophet.state.route import route
from prophet.state.route_schedule import RouteSchedule
from prophet.state.space import Box, Space
from prophet.state.transition import State, transition


@dataclass(frozen=True, kw_only=True)
class TrainingLayout:
    """Who runs what.

    Attributes:
        rank_assignment: The processes' places, and this one's communicators.
        stage_map: Which pipeline rank runs which layers.
        owners: Who updates which tensor.
        microbatches: How many a replica runs per step.
        model: Runs the units; it is of the same modules as the one in force, which None leaves as it is.
        nodes: [N] the processes' nodes, as routes take them.
        durations: The stages' expected seconds (None: not known).
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
    """A move from what is in force to `target`, as one process sees it.

    Attributes:
        target: Who is to run what.
        space: All tensors of the state.
        place: This process's pipeline rank in the target; P for none.
        config: How the pipeline trains there.
        new_owner: What the mover owns there, where another model runs the units.
        schedule: What ranks have agreed to run (None: it is asked for).
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
        """Pick from these plain numbers those of parameters that a process updates there."""
        owners = self.target.owners
        return {n: value for n, value in numbers.items() if process in owners.updaters(base_name(n), self.place)}


@dataclass(frozen=True, kw_only=True)
class Built:
    """The stages of a target, made on the side.

    Attributes:
        stages: The stages, not in force yet.
        owned: The parameters of `model` (None: as now).
        model: What runs the units there (None: as now).
    """

    stages: Stages
    owned: Ownership | None = None
    model: PipelineModel | None = None


@dataclass
class PipelineState:
    """The training state of a pipeline: what is held, where it lies, and how it goes elsewhere or into files.

    Attributes:
        mover: The pipeline's parts.
        passes: What is under way in the pipeline.
        moves_experts: Whether it takes along what replicas share of experts.
    """

    mover: StateMover
    passes: Passes
    moves_experts = False

    @property
    def now(self) -> Stages:
        """The stages in force."""
        return self.passes.now

    def in_force(self) -> TrainingLayout:
        """Return who runs what now."""
        given: dict[str, Any] = {"rank_assignment": self.mover.groups.rank_assignment, "stage_map": self.now.stage_map}
        return TrainingLayout(owners=self.passes.owners, microbatches=self.mover.builder.config.microbatches, **given)

    def during(self, what: str) -> AbstractContextManager[None]:
        """The context of what all processes do together before the next step: see `Failures.during`."""
        return self.mover.groups.failures.during(f"{what} {self.passes.progress.updates}", self.now.stage_map)

    def check_static(self, what: str) -> None:
        """Raise `SpecError` where layers share experts that this does not take along."""
        if not self.moves_experts:
            self.passes.experts.check_static(what)

    def items(self) -> list[Item] | str:
        """Find this process's state without gradients, or the reason why it cannot be moved."""
        units = self.now.stage_map.layers_on(self.mover.groups.rank)
        found: list[Item] | str = self.mover.attempt(
            lambda: items(self.mover.owned, self.mover.optimizers, units, gradients=False)
        )
        return found

    def described(self, found: list[Item] | str) -> Held | str:
        """Describe what was found, or return the reason why it cannot be moved; in any thread."""
        held: Held | str = (
            found if isinstance(found, str) else self.mover.attempt(lambda: Held.of(found, self.mover.owned.cut()))
        )
        return held

    def describe(self) -> Held | str:
        """Find and describe this process's state without gradients, or return the reason why it cannot be moved."""
        return self.described(self.items())

    def route_schedule(self, every: Sequence[Sequence[Any]], target: TrainingLayout, rank: int) -> RouteSchedule:
        """Find the route to another layout; in any thread.

        Args:
            every: What every process holds, as `spec_rows`.
            target: The layout to go to.
            rank: This process's number.

        Raises:
            TransitionError: A process lacks something that it should hold.
        """
        space, before = self.held_by(every)
        return RouteSchedule(route(before, self.layout(space, target, len(every)), nodes=target.nodes), rank)

    def held_by(self, every: Sequence[Sequence[Any]]) -> tuple[Space, Layout]:
        """Find the space of what all processes hold, and who holds what in force.

        Raises:
            TransitionError: A process lacks something that it should hold.
        """
        # the union: with stages, no process holds everything
        space = space_of([row for rows in every for row in rows])
        before = self.layout(space, None, len(every))
        for rank, described in enumerate(every):
            # the route would send from a process what it does not have
            lacks = before.names_on(rank) - {row[0] for row in described}
            if lacks:
                raise TransitionError(
                    f"rank {rank} does not keep {min(lacks)}, which others do: keep it on every replica"
                )
        return space, before

    def layout(self, space: Space, target: TrainingLayout | None, processes: int) -> Layout:
        """Place all tensors on processes.

        Args:
            space: All tensors.
            target: The layout (None: what is in force).
            processes: N, spare ones included.
        """
        tied, cut = self.mover.owned.tied(), self.mover.owned.cut()
        if target is not None:
            rows = target.rank_assignment.grid.rows
            return layout_over(space, rows, target.stage_map, target.owners, tied, processes, cut=cut)
        # replicas may differ in buffers, such as running means, so the first replica's count
        grid = self.mover.groups.grid
        own: tuple[StageMap, Owners] = (self.now.stage_map, self.passes.owners)
        return layout_over(space, grid.rows, *own, tied, processes, first=True, cut=cut)

    def check_free(self) -> None:
        """Raise `SpecError` where something holds what a switch replaces, and would go on with the old values."""
        check_free(self.mover.owned.parameters)

    def copies(self) -> dict[str, Any]:
        """Return digests of tensors that other processes have too, besides replicas and ties."""
        return {}

    def compare(self, every: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a move where the `copies` of all processes differ, by raising `SpecError`."""

    def assignments(self, to: Going, built: Built, change: Change) -> Assignments:
        """Make the assignments that put a built target in force with its state.

        Args:
            to: The move.
            built: The stages there.
            change: The state in its place, and the modules where they are other ones.
        """
        mover, passes = self.mover, self.passes

        def model() -> None:
            if change.owned is not None:
                # the object stays: all parts of the pipeline refer to it
                mover.owned.become(change.owned)
                mover.builder.model = mover.owned.model

        def train() -> None:
            mover.builder.config = to.config

        return [
            change.make,
            model,
            train,
            lambda: mover.groups.assign(to.target.rank_assignment),
            passes.switch,
            lambda: passes.go_on(built.stages, to.target.owners),
        ]

    def numbers_to_vote(self, held: Held) -> dict[str, Any]:
        """Return the plain numbers that this process gives to all others: those of parameters that it updates."""
        groups, owners = self.mover.groups, self.passes.owners
        here, rank = groups.world.rank, groups.rank
        return {n: v for n, v in held.scalars.items() if here in owners.updaters(base_name(n), rank)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of all parameters and buffers, in the form of checkpoints."""
        owned = self.mover.owned
        return {name: tuple(owned.whole(name).shape) for name in (*owned.parameters, *owned.buffers)}

    def going(self, target: TrainingLayout, space: Space, **more: Any) -> Going:
        """Describe the move to `target` on this process; `more` is the rest of `Going`."""
        config = replace(self.mover.builder.config, microbatches=target.microbatches)
        place = target.rank_assignment.grid.pipeline_rank_of(self.mover.groups.world.rank)
        return Going(**{"target": target, "space": space, "place": place, "config": config, **more})

    def build(self, to: Going, boxes: Mapping[str, Box]) -> Built:
        """Make the new stages on the side with all that needs no values; `boxes` are of the state that comes here.

        Raises what is wrong on this process.
        """
        mover = self.mover
        # found out before anything moves: weak references within torch forbid to exchange a parameter's content
        mover.check_put(mover.owned.parameters)
        builder = mover.builder if to.new_owner is None else replace(mover.builder, model=to.new_owner.model)
        return Built(stages=self._stages(builder, to))

    def _stages(self, builder: StageBuilder, to: Going) -> Stages:
        given: dict[str, Any] = {"rank": to.place, "config": to.config, "schedule": to.schedule}
        return builder.build(to.target.stage_map, to.target.durations, **given)

    def change(self, to: Going, built: Built, state: State, numbers: Mapping[str, Any]) -> Change:
        """Make the assignments that put the state in its place, all checked.

        Args:
            to: The move.
            built: The stages there.
            state: The tensors that this process has there.
            numbers: Plain numbers that optimizers keep, of all processes, by name.
        """
        return self.mover.change(to.layers, state, to.updates(numbers, self.mover.groups.world.rank), to.new_owner)

    def beside(self, others: list[Tensor]) -> list[Tensor]:
        """Return what is given up with the state and does not move: `others`, which copies have elsewhere, and
        padding.
        """
        return others

    def drop(self) -> None:
        """Forget the state that was lost: what has it goes to `meta`, so that using it is an error."""
        self.mover.drop()

    def whole_state(self, rank: int, state_dict_of: Callable[[nn.Module], dict[str, Any]]) -> dict[str, Tensor]:
        """Gather the unsplit model's `state_dict` in the host's memory of process `rank`; collective. Empty elsewhere.

        Args:
            rank: The process that gets it.
            state_dict_of: Takes the `state_dict` of a copy of the unsplit model.

        Raises:
            SpecError: On all processes where one cannot describe its state, or copies differ.
        """
        with self.during("collecting the model before step"):
            return self._whole_state(rank, state_dict_of)

    def _whole_state(self, rank: int, state_dict_of: Callable[[nn.Module], dict[str, Any]]) -> dict[str, Tensor]:
        collective, kept = self.mover.groups.world, [Held()]

        def described() -> list[Any]:
            # inside `agree`: raised here alone, it would leave other ranks waiting
            if not 0 <= rank < collective.size:
                raise SpecError(f"the model is to be collected on rank {rank} of {collective.size}")
            self.passes.read_model()
            items = self.items()
            # optimizer state is left out here, before it is described: odd state refuses no state_dict
            if not isinstance(items, str):
                items = [item for item in items if item.kind in ("parameter", "buffer")]
            found = self.described(items)
            if isinstance(found, str):
                raise SpecError(found)
            kept[0] = found
            return [rank, spec_rows(found.specs)]

        def agree(call: Callable[[], Any]) -> list[Any]:
            return from_all(call, collective, Operation("collecting the model"))

        every = agree(described)
        refuse_where([to for to, _ in every], "collect the model on another rank")
        space = space_of([row for _, rows in every for row in rows])
        before, here = self.layout(space, None, collective.size), collective.rank
        # one copy of each tensor is gathered, so copies that differ would go unnoticed
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
        # what was here already is the memory of parameters, which training goes on to change
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
        """Make a copy of the root hold all of the state, where modules hold parts of it."""


def copies(layout: Layout, rank: int, held: Held) -> dict[str, int]:
    """Digest what this process has and others have too, by piece.

    Args:
        layout: Who holds what.
        rank: This process.
        held: What it holds.
    """
    table, names = layout.table, layout.space.tensors
    holders = np.diff(table.start)
    # a digest reads every byte, so only what can be compared is digested
    shared = (int(k) for k in table.on(rank) if holders[k] > 1)
    pieces = (Piece(names[int(table.tensor[k])].name, table.box(k)) for k in shared)
    return {str(piece): digest_of([("", held.tensors[piece.name])]) for piece in pieces}


def refuse_copies_apart(every: Sequence[Mapping[str, int]]) -> None:
    """Raise `SpecError` where the `copies` of something differ between processes."""
    holders: dict[str, dict[int, dict[str, int]]] = {}
    for rank, row in enumerate(every):
        for piece, digest in row.items():
            # errors name the tensor; its box in brackets says little to a user
            name = piece.partition("[")[0]
            holders.setdefault(piece, {})[rank] = {name: digest}
    for column in holders.values():
        refuse_apart(column)
