"""Moving training state to another stage map: all of it, or nothing has changed.

Layers that stay keep their memory. Layers that move bring parameters, buffers, optimizer state and gradients along, so
the loss does not notice. Whatever can fail (memory, messages, the new stages) happens on the side. Then ranks agree
once, and what is left is assignments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_balance.pipeline.agreement import from_all, refuse_where
from pipeline_balance.pipeline.optimizers import Optimizers
from pipeline_balance.pipeline.ownership import HeldBuffer, Ownership, digest_of, like_meta, put, try_put
from pipeline_balance.pipeline.registered import Settings, settings
from pipeline_balance.pipeline.replicas import check_alike, refuse_apart
from pipeline_balance.pipeline.stages import PipelineGroups, StageBuilder, Stages
from pipeline_balance.pipeline.ties import Tie, refuse_untied, tie_digests, ties_of
from pipeline_balance.pipeline.training_state import (
    Held,
    agree,
    by_layer,
    collect,
    described,
    share,
    state_entries,
    union,
)
from pipeline_balance.schedules.actions import Schedule
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import StageMap
from prophet.errors import BudgetError, CollectiveError, SpecError, TransitionError
from prophet.ranks.collective import Collective, Operation
from prophet.state.itinerary import Itinerary
from prophet.state.layout import Piece
from prophet.state.route import route
from prophet.state.space import Space, TensorSpec
from prophet.state.transition import Allocate, State, empty, transition

WHOLE = "the state from before the move is whole"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebuilt:
    """What a change of stage map took on this rank: bytes on the wire, memory beyond the old state, seconds."""

    sent_bytes: int
    received_bytes: int
    buffer_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What `StateMover.prepare` has done ahead of a change to `stage_map`."""

    stage_map: StageMap
    specs: tuple[TensorSpec, ...]
    itinerary: Itinerary

    def fits(self, stage_map: StageMap, held: Held | str) -> bool:
        """Whether it is for this map, and this rank's state still has that shape."""
        return self.stage_map == stage_map and isinstance(held, Held) and self.specs == tuple(held.specs)


@dataclass
class Change:
    """Assignments that put moved state in its place on this rank; nothing in `make` can fail
    once `check` has passed.

    `contents` has what parameters become, `grads`, `states` and `settings` (of registered tensors) what belongs to them
    afterwards; `buffers` likewise. `owned` is what the mover is to own then, where another model runs the units.
    """

    contents: list[tuple[nn.Parameter, nn.Parameter]] = field(default_factory=list)
    grads: list[tuple[nn.Parameter, Tensor | None]] = field(default_factory=list)
    states: list[tuple[torch.optim.Optimizer, nn.Parameter, dict[str, Any] | None]] = field(default_factory=list)
    buffers: list[tuple[HeldBuffer, Tensor]] = field(default_factory=list)
    settings: Settings = field(default_factory=list)
    owned: Ownership | None = None

    def check(self) -> None:
        """Raise RuntimeError on a parameter whose content cannot be exchanged."""
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

    `budget_bytes` bounds this rank's buffers; the least of all ranks holds. `allocate` is how memory is asked for.
    """

    builder: StageBuilder
    owned: Ownership
    optimizers: Optimizers
    budget_bytes: int
    allocate: Allocate = empty

    @property
    def groups(self) -> PipelineGroups:
        return self.builder.groups

    @property
    def device(self) -> torch.device:
        return self.builder.config.device

    def prepare(self, now: Stages, stage_map: StageMap, collective: Collective) -> Prepared:
        """Describe the state and find the route; collective."""
        self.builder.check_map(stage_map)
        held = self._collect(now, gradients=False)
        space, _ = share(held, collective, self.device, WHOLE)
        way = self._itinerary(space, now.stage_map, stage_map)
        way.foresee(self.budget_bytes, in_place=False)
        specs = tuple(held.specs) if isinstance(held, Held) else ()
        return Prepared(stage_map=stage_map, specs=specs, itinerary=way)

    def check_replicas(self, stage_map: StageMap) -> None:
        """Raise `SpecError` on a column whose replicas have other parameters; collective over each column."""
        groups = self.groups
        names = self.owned.of(stage_map.layers_on(groups.rank))
        named = [(name, self.owned.parameters[name]) for name in names]
        check_alike(named, groups.column, groups.grid.column(groups.rank))

    def rebuild(
        self,
        now: Stages,
        stage_map: StageMap,
        durations: Durations | None = None,
        prepared: Prepared | None = None,
        *,
        gradients: bool = True,
        midway: bool = False,
    ) -> tuple[Stages, Rebuilt]:
        """The stages of `stage_map` with the state of `now`, and what that took; collective.

        Without `gradients`, those are dropped once all else has moved: they have been used. `midway` says whether an
        update is under way. Raises `SpecError` on all ranks unless all may go from map to map and follow one schedule,
        or where replicas have come apart. Raises `TransitionError` on all ranks where ties have come apart or the state
        cannot be moved. After either, everything is as it was.
        """
        began = time.perf_counter()
        held, way, scalars, schedule = self._facts(
            now, stage_map, durations, prepared, gradients=gradients, midway=midway
        )
        found: tuple[Stages, Change] | str | None = None

        def conclude(state: State, problem: str) -> None:
            nonlocal found
            found = problem or self.attempt(lambda: self.assemble(stage_map, state, scalars, durations, schedule))
            self._agree(found)

        try:
            moved = transition(
                way.route,
                {piece: self._piece(held, piece) for piece in way.route.before.on(self.groups.rank)},
                self.groups.collective,
                budget_bytes=self.budget_bytes,
                device=self.device,
                allocate=self.allocate,
                conclude=conclude,
                ahead=way,
            )
        except (TransitionError, BudgetError) as error:
            if found is None and self.groups.grid.replicas > 1:
                self._agree(str(error))  # other replicas may be ready
            raise
        assert isinstance(found, tuple)
        stages, change = found
        change.make()
        return stages, Rebuilt(
            sent_bytes=moved.sent_bytes,
            received_bytes=moved.received_bytes,
            buffer_bytes=moved.buffer_bytes,
            seconds=time.perf_counter() - began,
        )

    def _facts(
        self,
        now: Stages,
        stage_map: StageMap,
        durations: Durations | None,
        prepared: Prepared | None,
        *,
        gradients: bool,
        midway: bool,
    ) -> tuple[Held, Itinerary, dict[str, Any], Schedule | None]:
        """What this rank holds, its part of the route, optimizers' plain numbers, and the new schedule; collective.

        All that ranks compare before a move goes in one message, with plain numbers in words: see `rebuild` for what is
        refused.
        """
        groups, before = self.groups, now.stage_map
        ties: tuple[Tie, ...] = ()
        held: Held | str = ""
        schedule: Schedule | None = None

        def say() -> dict[str, Any]:
            nonlocal ties, held, schedule
            self.owned.read()
            self.builder.check_map(stage_map)
            schedule = self.builder.schedule(stage_map, durations)
            ties = ties_of(self.owned)
            if midway and any(len(tie.holders(m)) > 1 for tie in ties for m in (before, stage_map)):
                raise SpecError("tied parameters have parts of a gradient on several ranks: move after update=True")
            held = self._collect(now, gradients=gradients)
            ready = prepared is not None and prepared.fits(stage_map, held)
            said = {"map": [stage_map.boundaries, stage_map.ranks], "schedule": self.builder.number(schedule)}
            said |= {"ready": ready, "state": described(held, tensors=not ready)}
            if isinstance(held, Held):
                names = self.owned.of(before.layers_on(groups.rank)) if groups.grid.replicas > 1 else []
                weights = {name: digest_of([(name, self.owned.parameters[name])]) for name in names}
                said["weights"] = weights
                said["ties"] = tie_digests(ties, before, groups.rank, self.optimizers.state(), weights)
            return said

        every = from_all(say, groups.world, self.device, Operation("agreeing on a move"))
        refuse_where([said["map"] for said in every], "were given another stage map")
        refuse_where([said["schedule"] for said in every], "follow another schedule")
        space, scalars = union([said["state"] for said in every], WHOLE)
        assert isinstance(held, Held)
        for rank in range(groups.grid.pipeline_ranks):
            refuse_apart({process: every[process]["weights"] for process in groups.grid.column(rank)})
        refuse_untied(ties, before, groups.grid, [said["ties"] for said in every])
        ready = [said["ready"] for said in every]
        if prepared is not None and all(ready):
            return held, prepared.itinerary, scalars, schedule
        if any(ready):  # on another rank something has changed since
            space, scalars = share(held, groups.world, self.device, WHOLE)
        return held, self._itinerary(space, before, stage_map), scalars, schedule

    def check_put(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raise `TransitionError` for a parameter whose content cannot be exchanged; nothing changes."""
        for name, parameter in parameters.items():
            try:
                try_put(parameter, like_meta(parameter))
            except RuntimeError as error:
                raise TransitionError(f"{name} cannot be exchanged: {error}") from error

    def drop(self) -> None:
        """Forget state whose memory is gone: what has it goes to `meta`, so that using it is an error."""
        for handle, tensor in settings(self.owned.parameters, {}):
            handle.tensor = tensor
        self.owned.keep_only(())
        for optimizer in self.optimizers.all:
            optimizer.state.clear()

    def attempt(self, call: Callable[[], Any]) -> Any:
        """What `call` returns, or in words why it failed on this rank."""
        try:
            return call()
        except Exception as error:
            return f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"

    def _agree(self, found: tuple[Stages, Change] | str) -> None:
        """Raise `TransitionError` on all ranks unless all have assembled theirs; the last thing that can fail."""
        problem = f"the new stages could not be built ({found})" if isinstance(found, str) else ""
        op = Operation("concluding a move")
        try:
            agree(problem, self.groups.world, self.device, op, WHOLE)
        except CollectiveError as error:
            raise TransitionError(f"{error}; {WHOLE}") from error

    def _piece(self, held: Held, piece: Piece) -> Tensor:
        """What this rank has of a piece; of a gradient that only other replicas have so far, zeros."""
        name, _, kind = piece.name.partition("#")
        if kind == "grad" and piece.name not in held.tensors:
            return torch.zeros_like(self.owned.parameters[name])
        return held.tensors[piece.name]

    def _collect(self, now: Stages, *, gradients: bool) -> Held | str:
        units = now.stage_map.layers_on(self.groups.rank)
        held: Held | str = self.attempt(lambda: collect(self.owned, self.optimizers, units, gradients=gradients))
        return held

    def assemble(
        self,
        stage_map: StageMap,
        state: State,
        scalars: Mapping[str, Any],
        durations: Durations | None = None,
        schedule: Schedule | None = None,
    ) -> tuple[Stages, Change]:
        """The stages of `stage_map`, and the assignments that give them this state; see `StageBuilder.build`."""
        stages = self.builder.build(stage_map, durations, schedule=schedule)
        return stages, self.change(stage_map.layers_on(self.groups.rank), state, scalars)

    def change(
        self, units: Collection[int], state: State, scalars: Mapping[str, Any], becomes: Ownership | None = None
    ) -> Change:
        """The assignments that give this rank the state of `units`, all checked.

        `becomes` is of another model that runs them from then on, with the same parameters.
        """
        values = {piece.name: tensor for piece, tensor in state.items()}
        entries = state_entries(values, scalars)
        optimizer_of = self.optimizers.of()
        mine = set(self.owned.of(units))
        change = Change(settings=settings(self.owned.parameters, values), owned=becomes)
        for name, parameter in self.owned.parameters.items():
            optimizer = optimizer_of.get(id(parameter))
            if name in mine:
                tensor = values[name]
                if parameter.is_meta or parameter.data_ptr() != tensor.data_ptr():
                    change.contents.append((parameter, nn.Parameter(tensor, requires_grad=parameter.requires_grad)))
                change.grads.append((parameter, values.get(f"{name}#grad")))
                if optimizer is not None:
                    change.states.append((optimizer, parameter, entries.get(name)))
            elif not parameter.is_meta:
                change.contents.append((parameter, like_meta(parameter)))
                change.grads.append((parameter, None))
                if optimizer is not None:
                    change.states.append((optimizer, parameter, None))
        for name, buffer in self.owned.buffers.items():
            if not set(buffer.units).isdisjoint(units):
                change.buffers.append((buffer, values[name]))
            elif not buffer.tensor.is_meta:
                change.buffers.append((buffer, buffer.tensor.to("meta")))
        change.check()
        return change

    def _itinerary(self, space: Space, before: StageMap, after: StageMap) -> Itinerary:
        ranks, tied = self.groups.grid.pipeline_ranks, self.owned.tied()
        way = route(by_layer(space, before, ranks, tied), by_layer(space, after, ranks, tied))
        return Itinerary(way, self.groups.rank)
