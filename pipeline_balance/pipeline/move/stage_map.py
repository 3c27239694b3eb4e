"""Moving training state to another stage map, within every replica of a pipeline.

Layers that stay keep their memory. Layers that move bring parameters, buffers, optimizer state and gradients along, so
the loss does not notice. With zero=1 the state of an optimizer goes to its owner under the new map, who may be in
another replica: then all replicas move in one route.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.model.ownership import (
    HeldBuffer,
    Ownership,
    digest_of,
    like_meta,
    number_of,
    put,
    try_put,
)
from pipeline_balance.pipeline.model.registered import Settings, settings
from pipeline_balance.pipeline.move.ahead import Early, bring, early_of, rest_of
from pipeline_balance.pipeline.move.state import (
    Held,
    base_name,
    by_layer,
    collect,
    expected_gradients,
    layout_over,
    specs_of,
    state_entries,
    without_replica,
)
from pipeline_balance.pipeline.move.transaction import Assignments, Move, Prepared, Switched
from pipeline_balance.pipeline.move.votes import WHOLE, Vote, refuse_against, share, union
from pipeline_balance.pipeline.run.optimizers import Optimizers
from pipeline_balance.pipeline.run.passes import Passes
from pipeline_balance.pipeline.run.replicas import refuse_apart
from pipeline_balance.pipeline.run.stages import PipelineGroups, StageBuilder, Stages, alone
from pipeline_balance.pipeline.run.ties import Tie, refuse_untied, tie_digests, ties_of
from pipeline_balance.pipeline.run.zero1 import Owners
from pipeline_balance.schedules.actions import Schedule
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError, TransitionError, in_a_line
from prophet.ranks.collective import Collective
from prophet.state.layout import Layout, Piece
from prophet.state.route import route
from prophet.state.route_schedule import RouteSchedule
from prophet.state.space import Space
from prophet.state.transition import Allocate, Moved, State, empty


@dataclass
class Change:
    """Assignments that put moved state in its place on this rank; nothing in `make` can fail once `check` has passed.

    Attributes:
        contents: What parameters are to hold, as (parameter, content).
        grads: Their gradients afterwards.
        states: What optimizers keep for them afterwards; None: nothing.
        buffers: What buffers are to hold.
        settings: What registered tensors are to hold.
        owned: What the mover is to own then, where another model runs the units.
    """

    contents: list[tuple[nn.Parameter, nn.Parameter]] = field(default_factory=list)
    grads: list[tuple[nn.Parameter, Tensor | None]] = field(default_factory=list)
    states: list[tuple[torch.optim.Optimizer, nn.Parameter, dict[str, Any] | None]] = field(default_factory=list)
    buffers: list[tuple[HeldBuffer, Tensor]] = field(default_factory=list)
    settings: Settings = field(default_factory=list)
    owned: Ownership | None = None

    def check(self) -> None:
        """Raise RuntimeError on a parameter whose content cannot be exchanged; nothing changes."""
        for parameter, content in self.contents:
            try_put(parameter, content)

    def make(self) -> None:
        """Change parameters, gradients, optimizer state, buffers and registered tensors."""
        for parameter, content in self.contents:
            put(parameter, content)
        for parameter, grad in self.grads:
            parameter.grad = grad
        for optimizer, parameter, entries in self.states:
            if entries is None:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter] = entries
        for buffer, tensor in self.buffers:
            buffer.module._buffers[buffer.name] = tensor
        for handle, tensor in self.settings:
            handle.tensor = tensor


@dataclass
class StateMover:
    """Takes the training state from the stages in force to those of another map; see `ElasticPipeline`'s methods.

    Attributes:
        builder: Makes the stages.
        owned: Parameters and buffers of the model.
        optimizers: What keeps state for them.
        budget_bytes: Bounds this rank's buffers in a move; the least of all ranks holds.
        allocate: How memory is asked for.
    """

    builder: StageBuilder
    owned: Ownership
    optimizers: Optimizers
    budget_bytes: int
    allocate: Allocate = empty

    @property
    def groups(self) -> PipelineGroups:
        """The communicators of the pipeline."""
        return self.builder.groups

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.builder.config.device

    def prepare(
        self, now: Stages, owners: Owners, stage_map: StageMap, collective: Collective, *, early: bool = False
    ) -> Prepared:
        """Describe the state and find the route; collective.

        Args:
            now: The stages in force.
            owners: Who updates what under them.
            stage_map: The map to go to.
            collective: Over the ranks of the pipeline; a separate one if a step is under way.
            early: Whether to send now what only an update changes, for a move before this step's update.
        """
        self.builder.check_map(stage_map)
        # a backward pass may be filling gradients in: the route holds if there are none when the move begins
        to = owners.under(stage_map)
        moving = self.moving(now.stage_map, stage_map, owners)
        held = self.collect(now, owners, moving, gradients=False)
        brought = self._bring(held, now, (owners, to), stage_map, collective) if early else None
        if brought is not None and isinstance(held, Held):
            held = rest_of(held).with_(self.expected(now, owners, moving))
        space, _ = share(held, collective, self.in_one_route(owners))
        route_schedule = self.route_schedule(space, (now.stage_map, owners), (stage_map, to))
        route_schedule.precompute(self.budget_bytes, in_place=False)
        return Prepared(target=(stage_map, to.table), specs=specs_of(held), route=route_schedule, early=brought)

    def _bring(
        self, held: Held | str, now: Stages, owners: tuple[Owners, Owners], stage_map: StageMap, collective: Collective
    ) -> Early | None:
        """Send what travels early, if anything does; collective.

        Args:
            held: What this rank holds.
            now: The stages in force.
            owners: Who updates what under the map in force, and under the one to go to.
            stage_map: The map to go to.
            collective: Over the ranks of the pipeline.
        """
        groups = self.groups
        mine = early_of(held) if isinstance(held, Held) else held
        names = {name: name for name in mine.tensors} if isinstance(mine, Held) else {}
        described = mine
        # in the order of processes where ranks and processes have the same numbers
        plain = groups.grid.rows == (tuple(range(groups.world.size)),)
        # else one route for all replicas, as there is one communicator beside a step
        if isinstance(mine, Held) and not plain and not owners[0].zero:
            described = mine.of_replica(owners[0], groups.rank, groups.replica)
            names = {name: without_replica(name)[0] for name in described.tensors}
        space, _ = share(described, collective, range(groups.world.size))
        grid, tied, cut = groups.grid, self.owned.tied(), self.owned.cut()

        def placed(stage_map: StageMap, owners: Owners) -> Layout:
            if plain:
                return by_layer(space, stage_map, grid.pipeline_ranks, tied, cut)
            return layout_over(space, grid.rows, stage_map, owners, tied, groups.world.size, cut=cut)

        before, after = placed(now.stage_map, owners[0]), placed(stage_map, owners[1])
        schedule = RouteSchedule(route(before, after), groups.world.rank)
        assert isinstance(mine, Held)
        memory: dict[str, Any] = {"budget_bytes": self.budget_bytes, "allocate": self.allocate}
        return bring(mine, names, schedule, collective, **memory)

    def in_one_route(self, owners: Owners) -> tuple[int, ...]:
        """The processes, by their numbers in the world, whose state goes in one route with this one's."""
        groups = self.groups
        # an owner may be in another replica than before; else each replica moves by itself, all by the same map
        return tuple(range(groups.world.size)) if owners.zero else groups.grid.replica(groups.replica)

    def carrier(self, owners: Owners) -> Collective:
        """What brings the state: over the processes that are `in_one_route`."""
        if owners.zero:
            return self.groups.world
        # a process that a job leaves out has nothing to send, and nobody to send it to
        return alone() if self.groups.spare else self.groups.collective

    def check_put(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raise `TransitionError` for a parameter whose content cannot be exchanged; nothing changes."""
        for name, parameter in parameters.items():
            try:
                try_put(parameter, like_meta(parameter))
            except RuntimeError as error:
                raise TransitionError(f"{name} cannot be exchanged: {error}") from error

    def drop(self) -> None:
        """Forget state whose memory is gone: what has it goes to `meta`, so that using it is an error."""
        # as if nothing had come: every registered tensor goes to `meta` with its parameter
        for handle, tensor in settings(self.owned.parameters, {}):
            handle.tensor = tensor
        self.owned.keep_only(())
        for optimizer in self.optimizers.all:
            optimizer.state.clear()

    def attempt(self, call: Callable[[], Any]) -> Any:
        """Call `call`; returns its result, or the reason in one line why it failed on this rank."""
        try:
            return call()
        except Exception as error:
            return in_a_line(error)

    def moving(self, before: StageMap, after: StageMap, owners: Owners) -> frozenset[int]:
        """Return the units whose state takes part in a move; all others keep theirs, untouched.

        Args:
            before: The map in force.
            after: The map to go to.
            owners: Who updates what: with zero=1 that may change for every unit.
        """
        if owners.zero:
            return frozenset(range(before.layers))
        found = {move.layer for move in before.moves_to(after)}
        # rows of a vocabulary are of all units
        several = (*self.owned.split, *self.owned.tied())
        ties, more = [set(self.owned.units_of[name]) for name in several], True
        while more:
            # what tied units share is on the ranks of all of them, so they move or stay together
            joined = found.union(*(units for units in ties if units & found))
            found, more = joined, joined != found
        return frozenset(found)

    def collect(self, now: Stages, owners: Owners, moving: Collection[int], *, gradients: bool) -> Held | str:
        """Describe what this rank holds of the units that move, or return the reason why it cannot be moved.

        Args:
            now: The stages in force.
            owners: Who updates what under them.
            moving: The units that move.
            gradients: Whether gradients count.
        """
        groups = self.groups
        units = [unit for unit in now.stage_map.layers_on(groups.rank) if unit in moving]
        held: Held | str = self.attempt(lambda: collect(self.owned, self.optimizers, units, gradients=gradients))
        return held.of_replica(owners, groups.rank, groups.replica) if owners.zero and isinstance(held, Held) else held

    def expected(self, now: Stages, owners: Owners, moving: Collection[int]) -> Held:
        """Describe the gradients that a step under way is going to leave on this rank.

        Args:
            now: The stages in force.
            owners: Who updates what under them.
            moving: The units that move.
        """
        groups = self.groups
        units = [unit for unit in now.stage_map.layers_on(groups.rank) if unit in moving]
        held = Held.of(expected_gradients(self.owned, units), self.owned.cut())
        return held.of_replica(owners, groups.rank, groups.replica) if owners.zero else held

    def change(
        self,
        units: Collection[int],
        state: State,
        scalars: Mapping[str, Any],
        new_owner: Ownership | None = None,
        *,
        moving: Collection[int] | None = None,
    ) -> Change:
        """Make the assignments that give this rank the state of `units`, all checked.

        Args:
            units: The units that run on this rank from then on.
            state: Their tensors.
            scalars: Plain numbers that optimizers keep, by name.
            new_owner: Of another model with the same parameters that runs the units from then on.
            moving: The units whose state has moved (None: all); nothing is done to others.
        """
        values = {piece.name: tensor for piece, tensor in state.items()}
        entries = state_entries(values, scalars)
        optimizer_of = self.optimizers.of()
        mine = set(self.owned.of(units))
        concerned = self.owned.parameters
        if moving is not None:
            concerned = {name: concerned[name] for name in self.owned.of(moving)}
        change = Change(settings=settings(concerned, values), owned=new_owner)
        for name, parameter in concerned.items():
            optimizer = optimizer_of.get(id(parameter))
            if name in mine:
                tensor = values[name]
                # a parameter that stays keeps its memory, and so do views of it that users have
                if parameter.is_meta or parameter.data_ptr() != tensor.data_ptr():
                    change.contents.append((parameter, nn.Parameter(tensor, requires_grad=parameter.requires_grad)))
                change.grads.append((parameter, values.get(f"{name}#grad")))
                if optimizer is not None:
                    change.states.append((optimizer, parameter, entries.get(name)))
            elif not parameter.is_meta:
                # also what other ranks run goes on as an object: it may come back, and optimizers' groups list it
                change.contents.append((parameter, like_meta(parameter)))
                change.grads.append((parameter, None))
                if optimizer is not None:
                    change.states.append((optimizer, parameter, None))
        for name, buffer in self.owned.buffers.items():
            if moving is not None and set(buffer.units).isdisjoint(moving):
                continue
            if not set(buffer.units).isdisjoint(units):
                change.buffers.append((buffer, values[name]))
            elif not buffer.tensor.is_meta:
                change.buffers.append((buffer, buffer.tensor.to("meta")))
        change.check()
        return change

    def route_schedule(
        self, space: Space, before: tuple[StageMap, Owners], after: tuple[StageMap, Owners]
    ) -> RouteSchedule:
        """Find the route from map to map of what the processes `in_one_route` hold.

        Args:
            space: All tensors.
            before: The map in force, and who updates what under it.
            after: Those to go to.
        """
        grid, tied, cut, world = self.groups.grid, self.owned.tied(), self.owned.cut(), self.groups.world

        def placed(stage_map: StageMap, owners: Owners) -> Layout:
            if owners.zero:
                return layout_over(space, grid.rows, stage_map, owners, tied, world.size, cut=cut)
            return by_layer(space, stage_map, carrier.size, tied, cut)

        carrier = self.carrier(before[1])
        return RouteSchedule(route(placed(*before), placed(*after)), carrier.rank)


@dataclass
class StageMove(Move):
    """The stages of a pipeline go to `stage_map`; see `ElasticPipeline.rebuild`.

    Gradients that were used are dropped once all else has moved. `compare` refuses ranks that do not go from map to map
    alike or follow other schedules, and replicas that have come apart (`SpecError`). It refuses ties that have, and
    state that cannot be moved (`TransitionError`).

    Attributes:
        mover: Takes the state.
        passes: What is under way in the pipeline.
        stage_map: The map to go to.
        durations: The new stages' expected seconds (None: not known).
        prepared: What was made ahead.
        remembered: What balancers remember of the layers on ranks where some come or go; from `compare` on.
    """

    mover: StateMover
    passes: Passes
    stage_map: StageMap
    durations: Durations | None = None
    prepared: Prepared = field(default_factory=Prepared)

    def __post_init__(self) -> None:
        mover = self.mover
        self.device, self.budget_bytes, self.allocate = mover.device, mover.budget_bytes, mover.allocate
        self._held: Held | str = ""
        self._ties: tuple[Tie, ...] = ()
        self._schedule: Schedule | None = None
        self._owners = self.passes.owners
        self.remembered: dict[str, Any] = {}
        self._ready, self._differ = 0, False
        self._moving: frozenset[int] = frozenset()

    def vote(self) -> Vote:
        mover, before, owners = self.mover, self.passes.now.stage_map, self.passes.owners
        mover.owned.read()
        mover.builder.check_map(self.stage_map)
        self._owners = owners.under(self.stage_map)
        self._schedule = mover.builder.schedule(self.stage_map, self.durations)
        self._ties = ties_of(mover.owned)
        if self._midway and any(len(tie.holders(m)) > 1 for tie in self._ties for m in (before, self.stage_map)):
            # the parts are summed up only when the update is complete, and could not be distinguished from copies
            raise SpecError("tied parameters have parts of a gradient on several ranks: move after update=True")
        experts, rank = self.passes.experts, mover.groups.rank
        if experts.under_way and self._regroups(range(mover.groups.grid.pipeline_ranks)):
            if not self.passes.complete:
                raise SpecError(
                    "gradients of balanced experts come home at the end of an update: move after update=True"
                )
            # what is remembered is read between two steps of a balancer, and another one takes its place
            if self._regroups([rank]):
                experts.finish()
        self._moving = mover.moving(before, self.stage_map, owners)
        self._held = held = mover.collect(self.passes.now, owners, self._moving, gradients=not self.passes.used)
        ready, ahead = self._holds(held), self.prepared.early
        # where the route is ready, the tensors need no description, which is most of a vote
        vote = Vote.of(
            self._to_go(held, ready),
            tensors=ready < 2,
            alike={
                "were given another stage map": [self.stage_map.boundaries, self.stage_map.ranks],
                "follow another schedule": mover.builder.number(self._schedule),
                "would update other parameters": number_of(str(self._owners.table)),
            },
            ready=ready,
            early=ahead.digests(held) if ready and ahead is not None and isinstance(held, Held) else {},
            # all that share the same experts remember the same
            more=experts.memory()
            if mover.groups.replica % mover.groups.grid.ep == 0 and self._regroups([rank])
            else {},
        )
        if isinstance(held, str):
            return vote
        replicas = mover.groups.grid.replicas
        # digests read every weight once, so a pipeline without replicas does without
        names = mover.owned.of(before.layers_on(rank)) if replicas > 1 else []
        own = {n: p for n in names if (p := mover.owned.parameters[n]) not in experts.parameters}
        weights = {name: digest_of([(name, parameter)]) for name, parameter in own.items()}
        # moments of one owner have no copies
        state = mover.optimizers.state() if not owners.zero else {}
        return replace(vote, copies=weights, ties=tie_digests(self._ties, before, rank, state, weights))

    def _holds(self, held: Held | str) -> int:
        """How much of what was made ahead holds, as in `Vote.ready`."""
        ahead, target = self.prepared, (self.stage_map, self._owners.table)
        if isinstance(held, str) or ahead.route is None or ahead.target != target:
            return 0
        if ahead.early is not None and not ahead.early.holds(held):
            return 0
        # in any order: of gradients that are only expected nobody knows where they will stand
        same = set(ahead.specs) == set(specs_of(self._to_go(held, 1)))
        return 2 if same else int(ahead.early is not None)

    def _to_go(self, held: Held | str, ready: int) -> Held | str:
        """What this move has to send: with `ready` all but what has travelled early."""
        early = ready and self.prepared.early is not None
        return rest_of(held) if early and isinstance(held, Held) else held

    def compare(self, votes: Sequence[Vote]) -> None:
        refuse_against(votes, self.whole)
        self._space, self._numbers = union(votes, WHOLE, self.mover.in_one_route(self.passes.owners))
        grid, replica = self.mover.groups.grid, self.mover.groups.replica
        # of the balancers of this rank's part of the replicas
        beside = [v for r, v in enumerate(votes) if grid.replica_of(r) // grid.ep == replica // grid.ep]
        self.remembered = {unit: memory for vote in beside for unit, memory in vote.more.items()}
        for rank in range(grid.pipeline_ranks):
            refuse_apart({process: votes[process].copies for process in grid.column(rank)})
        refuse_untied(self._ties, self.passes.now.stage_map, grid, [vote.ties for vote in votes])
        found = [vote.ready for vote in votes]
        self._ready, self._differ = min(found), len(set(found)) > 1
        digests: dict[str, set[int]] = {}
        for name, digest in (pair for vote in votes for pair in vote.early.items()):
            digests.setdefault(name, set()).add(digest)
        if any(len(some) > 1 for some in digests.values()):
            # somebody has changed what had been sent: all of it travels again
            self._ready, self._differ = 0, True

    def route_schedule(self, carrier: Collective) -> RouteSchedule:
        mover = self.mover
        if self.prepared.route is not None and self._ready == 2:
            return self.prepared.route
        if self._differ:
            # on another rank something has changed since, so the ranks that were ready describe their tensors now
            in_one_route = mover.in_one_route(self.passes.owners)
            held = self._to_go(self._held, self._ready)
            self._space, self._numbers = share(held, mover.groups.world, in_one_route)
        before = (self.passes.now.stage_map, self.passes.owners)
        return mover.route_schedule(self._space, before, (self.stage_map, self._owners))

    def prepare(self, route_schedule: RouteSchedule) -> None:
        assert isinstance(self._held, Held)
        lacks = route_schedule.route.before.names_on(route_schedule.rank) - self._held.tensors.keys()
        if lacks:
            raise TransitionError(f"{min(lacks)} is not kept here, as it is by others: keep it on every holder")

    def state(self, pieces: Sequence[Piece]) -> State:
        assert isinstance(self._held, Held)
        held = self._held.tensors
        # what is missing, `prepare` has said, and then nothing is sent
        return {piece: held[piece.name] for piece in pieces if piece.name in held}

    def assemble(self, moved: Moved) -> Assignments:
        mover, passes, groups, owners = self.mover, self.passes, self.mover.groups, self._owners
        stages = mover.builder.build(self.stage_map, self.durations, schedule=self._schedule)
        new = dict(moved.state)
        if self.early is not None:
            assert isinstance(self._held, Held)
            new |= self.early.state(self._held, self.device, self.allocate)
        state = {Piece(without_replica(piece.name)[0], piece.box): tensor for piece, tensor in new.items()}
        numbers: dict[str, Any] = {}
        for key, value in self._numbers.items():
            name, replica = without_replica(key)
            mine = not groups.spare and replica in (None, groups.replica)
            if mine and owners.updates(base_name(name), groups.rank, groups.replica):
                numbers[name] = value
        change = mover.change(self.stage_map.layers_on(groups.rank), state, numbers, moving=self._moving)
        # gradients that have moved are other tensors, whose marks must be set anew
        kept = [passes.gradients.keep] if self._midway else []
        # of layers that stay, too: those that moved have come without them
        dropped = [passes.gradients.drop] if passes.used else []
        return [change.make, lambda: passes.go_on(stages, owners), *kept, *dropped]

    @property
    def early(self) -> Early | None:
        """What has travelled early and holds on all ranks; known from `compare` on."""
        return self.prepared.early if self._ready else None

    def counted(self, done: Switched) -> Switched:
        """Return what this move took, with what travelled early.

        Args:
            done: What its last part took.
        """
        if self.early is None:
            return done
        early = self.early.moved
        return replace(
            done,
            messages=done.messages + early.messages,
            sent_bytes=done.sent_bytes + early.sent_bytes,
            received_bytes=done.received_bytes + early.received_bytes,
            early_bytes=early.sent_bytes + early.received_bytes,
        )

    def _regroups(self, ranks: Sequence[int]) -> bool:
        """Whether layers that share experts come to any of these pipeline ranks, or go."""
        before, after, shared = self.passes.now.stage_map, self.stage_map, self.passes.experts.shared
        return any(shared(before.layers_on(r)) != shared(after.layers_on(r)) for r in ranks)

    @property
    def _midway(self) -> bool:
        """Whether an update is under way, to which other batches may be added."""
        return self.passes.progress.parts > 0 and not self.passes.complete
