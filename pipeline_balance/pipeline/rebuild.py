"""Moving training state to another stage map, and building its stages: all of it, or nothing has changed.

Layers that stay keep their memory. Layers that move bring parameters, optimizer state, gradients and their random
stream along, so the loss does not notice.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline_balance.control.measure import PipelineLayer
from pipeline_balance.pipeline.stages import StageBuilder, Stages
from pipeline_balance.pipeline.training_state import Held, apply, by_layer, collect, gather_json, share
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import StageMap
from prophet.errors import TransitionError
from prophet.ranks.collective import Collective, Operation
from prophet.state.route import Route, route
from prophet.state.space import Space, TensorSpec
from prophet.state.transition import Allocate, State, empty, transition


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
    route: Route
    arrivals: Mapping[int, PipelineLayer]


@dataclass
class StateMover:
    """Takes the training state from the stages in force to those of another map; see `PipelineTrainer`'s methods.

    `budget_bytes` bounds this rank's buffers; the least of all ranks holds. `allocate` is how memory is asked for.
    """

    builder: StageBuilder
    budget_bytes: int
    allocate: Allocate = empty

    def __post_init__(self) -> None:
        self.groups = self.builder.groups
        self.device = self.builder.config.device

    def prepare(self, now: Stages, stage_map: StageMap, collective: Collective) -> Prepared:
        """Describe the state, find the route, make new layers and the new stages' process group; collective."""
        self.builder.check_map(stage_map)
        held = collect(now.layers, now.optimizer, gradients=False)
        space, _, _ = share(held, collective, self.device)
        way = self._route(space, now.stage_map, stage_map)
        mine = stage_map.layers_on(self.groups.rank)
        arrivals = {i: self.builder.new_layer(i) for i in mine if i not in now.layers}
        self.groups.of_stages(stage_map.used_ranks)
        return Prepared(stage_map=stage_map, specs=tuple(held.specs), route=way, arrivals=arrivals)

    def rebuild(
        self, now: Stages, stage_map: StageMap, *, durations: Durations | None = None, prepared: Prepared | None = None
    ) -> tuple[Stages, Rebuilt]:
        """The stages of `stage_map` with the state of `now`, and what that took; collective.

        Raises `TransitionError` on every rank, with `now` still whole, if the state cannot be moved.
        """
        began = time.perf_counter()
        self.builder.check_map(stage_map)
        held = collect(now.layers, now.optimizer)
        way, scalars, frozen = self._way(now, stage_map, held, prepared)
        moved = transition(
            way,
            {piece: held.tensors[piece.name] for piece in way.before.pieces[self.groups.rank]},
            self.groups.collective,
            budget_bytes=self.budget_bytes,
            device=self.device,
            allocate=self.allocate,
        )
        arrivals = prepared.arrivals if prepared is not None else {}
        try:
            mine = stage_map.layers_on(self.groups.rank)
            layers = {i: now.layers.get(i) or arrivals.get(i) or self.builder.new_layer(i) for i in mine}
            after = self.adopt(stage_map, layers, moved.state, scalars, frozen, durations)
        except (RuntimeError, MemoryError) as error:
            # a layer that stays has kept its memory, one that leaves its state: the old stages can go on
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            failed = f"rank {self.groups.rank}: the new stages could not be built ({reason})"
            raise TransitionError(f"{failed}; the state from before the move is whole") from error
        return after, Rebuilt(
            sent_bytes=moved.sent_bytes,
            received_bytes=moved.received_bytes,
            buffer_bytes=moved.buffer_bytes,
            seconds=time.perf_counter() - began,
        )

    def adopt(
        self,
        stage_map: StageMap,
        layers: dict[int, PipelineLayer],
        state: State,
        scalars: Mapping[str, Any],
        frozen: set[str],
        durations: Durations | None = None,
    ) -> Stages:
        """The stages of `stage_map` from these layers and their state (named as `collect` does); collective."""
        mine = {name: value for name, value in scalars.items() if int(name.split("/", 1)[0]) in layers}
        optimizer = apply(layers, self.builder.make_optimizer, state, mine, frozen)
        return self.builder.build(stage_map, layers, optimizer, durations)

    def _way(
        self, now: Stages, stage_map: StageMap, held: Held, prepared: Prepared | None
    ) -> tuple[Route, dict[str, Any], set[str]]:
        """The route, and what travels in words: plain numbers of the optimizer and the frozen parameters' names."""
        if prepared is not None and prepared.stage_map == stage_map:
            mine = {"ready": prepared.specs == tuple(held.specs), "scalars": held.scalars, "frozen": held.frozen}
            op = Operation("completing a prepared move")
            every = gather_json(mine, self.groups.collective, self.device, op)
            if all(said["ready"] for said in every):
                scalars = {name: value for said in every for name, value in said["scalars"].items()}
                return prepared.route, scalars, {name for said in every for name in said["frozen"]}
        space, scalars, frozen = share(held, self.groups.collective, self.device)
        return self._route(space, now.stage_map, stage_map), scalars, frozen

    def _route(self, space: Space, before: StageMap, after: StageMap) -> Route:
        ranks = self.groups.collective.size
        return route(by_layer(space, before, ranks), by_layer(space, after, ranks))
