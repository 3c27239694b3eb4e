"""`ElasticPipeline`: training over pipeline stages that can be cut anew between steps.

Shape legend: L layers, S stages, P ranks, M microbatches. The pipeline runs on torch.distributed.pipelining's schedule
runtime, which executes any list of actions over any map of stages to ranks. Stages are rebuilt between steps: layers
that stay keep their memory, layers that move bring parameters, optimizer state, gradients and their random stream
along, so the loss does not notice. A rank without a stage stays out of the pipeline's group (torch's runtime cannot
drive one) and waits for the next rebuild.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from pipeline_balance.control.measure import (
    Meter,
    PipelineLayer,
    RankTimes,
    gather_costs,
    local_costs,
)
from pipeline_balance.maps.compare import dense_ranks
from pipeline_balance.pipeline.training_state import (
    Held,
    apply,
    by_layer,
    collect,
    gather_json,
    share,
)
from pipeline_balance.schedules.actions import Schedule
from pipeline_balance.schedules.flexible import flexible
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import LayerCost, StageMap
from prophet.errors import SpecError, TransitionError
from prophet.ranks.collective import Collective, Operation
from prophet.ranks.process_group import ProcessGroupCollective
from prophet.state.route import Route, route
from prophet.state.space import TensorSpec
from prophet.state.transition import Allocate, State, empty, transition

BuildLayer = Callable[[int], nn.Module]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
LossFn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebuilt:
    """What a change of stage map took on this rank: bytes on the wire, memory beyond the old state, seconds."""

    stage_map: StageMap
    sent_bytes: int
    received_bytes: int
    buffer_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What `ElasticPipeline.prepare` has done ahead of a change to `stage_map`."""

    stage_map: StageMap
    specs: tuple[TensorSpec, ...]
    route: Route
    arrivals: Mapping[int, PipelineLayer]


class _MeteredStage(PipelineStage):
    """A stage whose actions are timed, and whose backward does no more than trainable parameters ask for.

    `trains` says whether a parameter of this stage or of one before it is trainable, `trains_before` whether one before
    is.
    """

    meter: Meter
    trains: bool
    trains_before: bool

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        inner = super().forward_one_chunk
        return self.meter.run_action("F", self.stage_index, lambda: inner(*args, **kwargs))

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        inner = super().backward_one_chunk
        if not self.trains:
            # A frozen prefix: nothing here or before it wants a gradient.
            self.fwd_cache.pop(bwd_chunk_id)
            self.bwd_cache[bwd_chunk_id] = (None,)
            return None
        # Without an input gradient to pass on first, splitting the backward has no use.
        full = full_backward or not self.trains_before
        kind = "B" if full else "I"
        return self.meter.run_action(kind, self.stage_index, lambda: inner(bwd_chunk_id, loss, full, last_backward))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if not (self.trains and self.trains_before):
            return None
        inner = super().backward_weight_one_chunk
        return self.meter.run_action("W", self.stage_index, lambda: inner(bwd_chunk_id, *args, **kwargs))


class ElasticPipeline:
    """A model of L layers in a row, trained over the ranks of `group`, with stages that may change between steps.

    `build_layer(i)` makes layer i, a module from one tensor to one tensor, equal on every rank that calls it;
    `make_optimizer` makes an optimizer for a list of parameters, with the learning rate then in force. `boundaries` are
    L + 1 example tensors of one microbatch: the input of every layer in turn, and the output of the last; shapes and
    types matter, values do not. `joining` is for a process that enters a group whose others call `change_group`: it
    starts without layers and learns the stage map from them (only the number of layers of its own `stage_map` counts).
    `loss_fn(output, target)` is the mean over a microbatch; a step's gradient is the mean over microbatches. With a
    `seed` every layer draws its random numbers from a stream of its own. `meter` takes the place of one with the wall
    clock.
    """

    def __init__(
        self,
        build_layer: BuildLayer,
        stage_map: StageMap,
        *,
        microbatches: int,
        loss_fn: LossFn,
        make_optimizer: MakeOptimizer,
        boundaries: Sequence[Tensor],
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        seed: int | None = None,
        split_backward: bool = False,
        budget_bytes: int = 64 << 20,
        timeout_s: float = 300.0,
        joining: bool = False,
        meter: Meter | None = None,
    ) -> None:
        if len(boundaries) != stage_map.layers + 1:
            raise SpecError(f"boundaries needs {stage_map.layers + 1} example tensors, got {len(boundaries)}")
        if microbatches < 1:
            raise SpecError(f"microbatches must be at least 1, got {microbatches}")
        self.build_layer = build_layer
        self.microbatches = microbatches
        self.loss_fn = loss_fn
        self.make_optimizer = make_optimizer
        self.device = device or torch.device("cpu")
        self.split_backward = split_backward
        self.budget_bytes = budget_bytes
        self.timeout_s = timeout_s
        self._limit = timedelta(seconds=timeout_s)
        self.seed = seed
        self.allocate: Allocate = empty
        self.meter = meter if meter is not None else Meter()
        self.durations: Durations | None = None
        self.refreshed = 0
        self._boundaries = [b.detach().to("meta") for b in boundaries]
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._side: Collective | None = None
        self._set_group(group)
        self.stage_map = stage_map
        if joining:
            self._adopt_map(knows=False)
        else:
            self._check_map(stage_map)
        mine = () if joining else self.stage_map.layers_on(self.rank)
        self.layers: dict[int, PipelineLayer] = {i: self._new_layer(i) for i in mine}
        parameters = [p for i in sorted(self.layers) for p in self.layers[i].parameters()]
        self.optimizer = make_optimizer(parameters) if parameters else None
        self._build()

    # --- groups -----------------------------------------------------------------------------------------------

    def _set_group(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.collective: Collective = ProcessGroupCollective(group, timeout_s=self.timeout_s)
        self._world = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self.rank = self.collective.rank
        self._groups = {}
        self._side = None

    @property
    def ranks(self) -> int:
        """Ranks that could run a stage, whether they do or not."""
        return self.collective.size

    @property
    def active(self) -> bool:
        """Whether this rank runs a stage."""
        return bool(self.layers)

    def _check_map(self, stage_map: StageMap) -> None:
        if stage_map.layers != len(self._boundaries) - 1:
            raise SpecError(f"the stage map is of {stage_map.layers} layers, the model has {len(self._boundaries) - 1}")
        if max(stage_map.ranks) >= self.ranks:
            raise SpecError(f"the stage map names rank {max(stage_map.ranks)} of {self.ranks}")

    def _pipeline_group(self, used: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of the ranks that run stages; made once per set of ranks, with all ranks taking part.

        torch derives a group's name from the number of groups a process has made, so ranks that stay out make one too,
        of themselves alone: else the counts part and the next group's members wait for each other under different
        names.
        """
        if used not in self._groups:
            members = [self._world[r] for r in used] if self.rank in used else [self._world[self.rank]]
            self._groups[used] = dist.new_group(members, timeout=self._limit, use_local_synchronization=True)
        return self._groups[used]

    # --- building ---------------------------------------------------------------------------------------------

    def _new_layer(self, index: int) -> PipelineLayer:
        module = self.build_layer(index).to(self.device)
        return PipelineLayer(module, index, self.meter, seed=self.seed)

    def schedule_for(self, stage_map: StageMap) -> Schedule:
        """The schedule that runs `stage_map`, with ranks renumbered without gaps."""
        dense = dense_ranks(stage_map)
        durations = self.durations
        if durations is not None and len(durations.forward_s) != dense.stages:
            durations = None
        return flexible(dense.ranks, self.microbatches, durations=durations, split_backward=self.split_backward)

    def _build(self) -> None:
        """Make torch's stages and schedule for the map in force."""
        self.meter.reset()
        self._runtime: Any = None
        used = self.stage_map.used_ranks
        group = self._pipeline_group(used)
        self._trains_below = self._trainable_prefix()
        if self.rank not in used:
            return
        schedule = self.schedule_for(self.stage_map)
        mine = [s for s, r in enumerate(self.stage_map.ranks) if r == self.rank]
        stages = []
        for s in mine:
            members = self.stage_map.layers_of(s)
            stage = _MeteredStage(
                nn.Sequential(*(self.layers[i] for i in members)),
                s,
                self.stage_map.stages,
                self.device,
                input_args=self._example(members.start),
                output_args=self._example(members.stop),
                group=group,
            )
            stage.meter = self.meter
            stage.trains_before = self._trains_below[members.start]
            stage.trains = self._trains_below[members.stop]
            stages.append(stage)
        runtime = _PipelineScheduleRuntime(stages, self.microbatches, loss_fn=self.meter.timed_loss(self.loss_fn))
        rows = {r: [_Action.from_str(str(a)) for a in row] for r, row in enumerate(schedule.actions)}
        runtime._prepare_schedule_with_comms(rows)
        self._runtime = runtime

    def _trainable_prefix(self) -> list[bool]:
        """Whether any layer below boundary b has a trainable parameter, [L + 1]; collective."""
        mine = torch.zeros(self.stage_map.layers, dtype=torch.int64)
        for i, layer in self.layers.items():
            mine[i] = int(any(p.requires_grad for p in layer.parameters()))
        every = self.collective.all_gather(mine.to(self.device), op=Operation("finding frozen layers")).cpu()
        below = every.amax(dim=0).cumsum(0).tolist()
        return [False, *(n > 0 for n in below)]

    def _example(self, boundary: int) -> Tensor:
        """Metadata of one boundary: a floating-point tensor carries a gradient if a layer below is trainable."""
        meta = self._boundaries[boundary]
        return meta.clone().requires_grad_(self._trains_below[boundary] and meta.is_floating_point())

    # --- training ---------------------------------------------------------------------------------------------

    def forward_backward(self, inputs: Tensor | None, target: Tensor | None) -> float | None:
        """All microbatches forward and backward; gradients are left in place.

        `inputs` [M * microbatch, ...] matters on the rank of the first stage, `target` on that of the last, which
        returns the mean loss; all others return None.
        """
        if self._runtime is None:
            return None
        first = self.stage_map.ranks[0] == self.rank
        last = self.stage_map.ranks[-1] == self.rank
        if (first and inputs is None) or (last and target is None):
            raise SpecError("the first stage needs inputs and the last one a target")
        losses: list[Tensor] = []
        self.meter.begin_step()
        args = (inputs,) if first else ()
        options = {"target": target, "losses": losses} if last else {}
        self._runtime.step(*args, **options, return_outputs=False)
        self.meter.end_step()
        return float(torch.stack([x.detach() for x in losses]).mean()) if last else None

    def step(self, inputs: Tensor | None, target: Tensor | None) -> float | None:
        """One training step: forward, backward, optimizer. Returns the mean loss where the last stage runs."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward_backward(inputs, target)
        if self.optimizer is not None:
            self.optimizer.step()
        return loss

    # --- measuring and moving ---------------------------------------------------------------------------------

    def measure(self) -> list[LayerCost]:
        """Costs of all layers since the last rebuild or `meter.reset()`; collective over all ranks, equal on all."""
        return gather_costs(self.local_costs(), self.stage_map.layers, self.collective, self.device)

    def local_costs(self) -> dict[int, LayerCost]:
        """Costs of this rank's layers."""
        stages = {s: self.stage_map.layers_of(s) for s, r in enumerate(self.stage_map.ranks) if r == self.rank}
        return local_costs(self.layers, stages, self.meter, self.optimizer)

    def times(self) -> RankTimes:
        """Where this rank's time went since the last rebuild."""
        return self.meter.times()

    def prepare(self, stage_map: StageMap, collective: Collective) -> Prepared:
        """Do ahead what a change to `stage_map` needs besides the state itself: describe it, find the route, make new
        layers and the new stages' process group. Collective over all ranks.

        May run in another thread while a step is under way, if `collective` is not the pipeline's own (see
        `side_collective`).
        """
        self._check_map(stage_map)
        held = collect(self.layers, self.optimizer, gradients=False)
        space, _, _ = share(held, collective, self.device)
        way = route(by_layer(space, self.stage_map, self.ranks), by_layer(space, stage_map, self.ranks))
        arrivals = {i: self._new_layer(i) for i in stage_map.layers_on(self.rank) if i not in self.layers}
        self._pipeline_group(stage_map.used_ranks)
        return Prepared(stage_map=stage_map, specs=tuple(held.specs), route=way, arrivals=arrivals)

    def side_collective(self) -> Collective:
        """A communicator of its own over all ranks, for use beside a step; made at the first call, by all ranks."""
        if self._side is None:
            group = dist.new_group(self._world, timeout=self._limit, use_local_synchronization=True)
            self._side = ProcessGroupCollective(group, timeout_s=self.timeout_s)
        return self._side

    def rebuild(
        self, stage_map: StageMap, *, durations: Durations | None = None, prepared: Prepared | None = None
    ) -> Rebuilt:
        """Change to `stage_map`, between steps; collective over all ranks, active or not.

        `durations` of the new stages, equal on all ranks, let the schedule order what is ready by when it will be.
        `prepared` is what `prepare` made for this map; where a rank's state has another shape by now it is not used.
        Raises `TransitionError` on every rank, with the old stages still in force, if the state cannot be moved.
        """
        began = time.perf_counter()
        self._check_map(stage_map)
        held = collect(self.layers, self.optimizer)
        way, scalars, frozen = self._way(stage_map, held, prepared)
        moved = transition(
            way,
            self._pieces(held, way.before.pieces[self.rank]),
            self.collective,
            budget_bytes=self.budget_bytes,
            device=self.device,
            allocate=self.allocate,
        )
        arrivals = prepared.arrivals if prepared is not None else {}
        self._adopt_or_stay(stage_map, arrivals, moved.state, scalars, frozen, durations)
        return Rebuilt(
            stage_map=stage_map,
            sent_bytes=moved.sent_bytes,
            received_bytes=moved.received_bytes,
            buffer_bytes=moved.buffer_bytes,
            seconds=time.perf_counter() - began,
        )

    def _way(
        self, stage_map: StageMap, held: Held, prepared: Prepared | None
    ) -> tuple[Route, dict[str, Any], set[str]]:
        """The route, and what travels in words: plain numbers of the optimizer and the frozen parameters' names."""
        if prepared is not None and prepared.stage_map == stage_map:
            mine = {
                "ready": prepared.specs == tuple(held.specs),
                "scalars": held.scalars,
                "frozen": held.frozen,
            }
            every = gather_json(mine, self.collective, self.device, Operation("completing a prepared move"))
            if all(said["ready"] for said in every):
                scalars = {name: value for said in every for name, value in said["scalars"].items()}
                return prepared.route, scalars, {name for said in every for name in said["frozen"]}
        space, scalars, frozen = share(held, self.collective, self.device)
        way = route(by_layer(space, self.stage_map, self.ranks), by_layer(space, stage_map, self.ranks))
        return way, scalars, frozen

    def _adopt_or_stay(self, stage_map: StageMap, arrivals: Mapping[int, PipelineLayer], *rest: Any) -> None:
        """`adopt`, or what was in force before: a layer that stays has kept its memory, one that leaves its state."""
        names = ("stage_map", "layers", "optimizer", "durations", "_runtime", "_trains_below")
        before = {name: getattr(self, name) for name in names}
        try:
            mine = stage_map.layers_on(self.rank)
            layers = {i: self.layers.get(i) or arrivals.get(i) or self._new_layer(i) for i in mine}
            self.adopt(stage_map, layers, *rest)
        except (RuntimeError, MemoryError) as error:
            for name, value in before.items():
                setattr(self, name, value)
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TransitionError(
                f"rank {self.rank}: the new stages could not be built ({reason}); "
                f"the state from before the move is whole"
            ) from error

    def adopt(
        self,
        stage_map: StageMap,
        layers: dict[int, PipelineLayer],
        state: State,
        scalars: Mapping[str, Any],
        frozen: set[str],
        durations: Durations | None = None,
    ) -> None:
        """Go on with `stage_map`, these layers and their state (as `state.training.collect` names it); collective."""
        mine = {name: value for name, value in scalars.items() if int(name.split("/", 1)[0]) in layers}
        self.optimizer = apply(layers, self.make_optimizer, state, mine, frozen)
        self.layers, self.stage_map, self.durations = layers, stage_map, durations
        self._build()

    def drop_gradients(self) -> None:
        """Forget gradients that the optimizer has used, so that they do not travel."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    def new_layers(self, stage_map: StageMap) -> dict[int, PipelineLayer]:
        """This rank's layers of `stage_map`, as they are before training."""
        return {i: self._new_layer(i) for i in stage_map.layers_on(self.rank)}

    def refresh(self) -> Rebuilt:
        """Build the same stages anew, after layers were frozen or thawed (`requires_grad_`); collective,
        between steps.
        """
        self.refreshed += 1
        return self.rebuild(self.stage_map)

    @staticmethod
    def _pieces(held: Held, pieces: Sequence[Any]) -> State:
        return {piece: held.tensors[piece.name] for piece in pieces}

    def leave_group(self) -> None:
        """Let go of the present group's communicators, before it is destroyed; `change_group` goes on in
        another one.
        """
        self._runtime = None
        self._groups = {}
        if self._side is not None:
            self._side.close()
            self._side = None
        self.collective.close()

    def change_group(self, group: dist.ProcessGroup | None, number: Mapping[int, int] | None) -> None:
        """Go on in another group (None: all processes); collective over its members, between steps.

        `number` maps this rank's old group's ranks to the new one's and must hold every rank that runs a stage; None
        where this process comes back and knows no stages. `release.Membership` calls this.
        """
        if number is not None:
            lost = sorted(set(self.stage_map.used_ranks) - set(number))
            if lost:
                raise SpecError(f"ranks {lost} still run stages and cannot leave: rebuild without them first")
            ranks = tuple(number[r] for r in self.stage_map.ranks)
            self.stage_map = StageMap(self.stage_map.boundaries, ranks)
        self._set_group(group)
        self._adopt_map(knows=number is not None)
        self._build()

    def _adopt_map(self, *, knows: bool) -> None:
        """Take the stage map from the first rank that knows it."""
        mine = [list(self.stage_map.boundaries), list(self.stage_map.ranks)] if knows else None
        said = gather_json(mine, self.collective, self.device, Operation("adopting the stage map"))
        found = next((s for s in said if s is not None), None)
        if found is None:
            raise SpecError("no rank of the group knows the stage map")
        self.stage_map = StageMap(tuple(found[0]), tuple(found[1]))
