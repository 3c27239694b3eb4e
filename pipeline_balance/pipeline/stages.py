"""Torch's stages and process groups for a stage map.

Shape legend: L layers, S stages, P ranks, M microbatches. torch.distributed.pipelining's schedule runtime executes any
list of actions over any map of stages to ranks. It cannot drive a rank without a stage, so such a rank stays out of the
pipeline's group and waits for the next rebuild.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from pipeline_balance.control.measure import Meter, PipelineLayer
from pipeline_balance.maps.compare import dense_ranks
from pipeline_balance.schedules.flexible import flexible
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from prophet.ranks.collective import DEFAULT_TIMEOUT_S, Collective, Operation
from prophet.ranks.process_group import ProcessGroupCollective

BuildLayer = Callable[[int], nn.Module]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
LossFn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """How a pipeline trains; equal on all ranks except `device`.

    `microbatches` is how many parts a step's batch is cut into. With a `seed` every layer draws its random numbers from
    its own stream. `split_backward` computes weight gradients apart from input gradients where that fills a wait.
    `budget_bytes` bounds the buffers that a move may take on a rank, and `timeout_s` every wait for another rank.
    """

    microbatches: int
    seed: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    split_backward: bool = False
    budget_bytes: int = 64 << 20
    timeout_s: float = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise SpecError(f"microbatches must be at least 1, got {self.microbatches}")


class PipelineGroups:
    """The process groups of one pipeline: of all its ranks, of those that run stages, and one for use beside a step."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._limit = timedelta(seconds=timeout_s)
        self.enter(group)

    def enter(self, group: dist.ProcessGroup | None) -> None:
        """Use `group` (None: all processes) from now on."""
        self.group = group
        self.collective: Collective = ProcessGroupCollective(group, timeout_s=self.timeout_s)
        self._world = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self.rank = self.collective.rank
        self._of_stages: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._side: Collective | None = None

    def leave(self) -> None:
        """Let go of the present group's communicators, before it is destroyed; `enter` goes on in another one."""
        self._of_stages = {}
        if self._side is not None:
            self._side.close()
            self._side = None
        self.collective.close()

    def of_stages(self, used: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of the ranks that run stages; made once per set of ranks, with all ranks taking part.

        torch derives a group's name from the number of groups a process has made, so ranks that stay out make one too,
        of themselves alone: else the counts part and the next group's members wait for each other under different
        names.
        """
        if used not in self._of_stages:
            members = [self._world[r] for r in used] if self.rank in used else [self._world[self.rank]]
            self._of_stages[used] = dist.new_group(members, timeout=self._limit, use_local_synchronization=True)
        return self._of_stages[used]

    def side(self) -> Collective:
        """A separate communicator over all ranks, for use beside a step; made at the first call, by all ranks."""
        if self._side is None:
            group = dist.new_group(self._world, timeout=self._limit, use_local_synchronization=True)
            self._side = ProcessGroupCollective(group, timeout_s=self.timeout_s)
        return self._side


@dataclass(frozen=True, kw_only=True)
class Stages:
    """What is in force on one rank: the stage map, this rank's layers by number, their optimizer, torch's runtime.

    A rank without a stage has no layers, no optimizer and no runtime. `durations` are the stages' expected seconds that
    the schedule was made for, None where they are not known.
    """

    stage_map: StageMap
    layers: dict[int, PipelineLayer]
    optimizer: torch.optim.Optimizer | None
    durations: Durations | None = None
    runtime: Any = None


@dataclass(frozen=True, kw_only=True)
class StageBuilder:
    """Makes layers, and torch's stages from them; see `PipelineTrainer`. `boundaries` are without memory."""

    build_layer: BuildLayer
    loss_fn: LossFn
    make_optimizer: MakeOptimizer
    boundaries: Sequence[Tensor]
    config: PipelineConfig
    groups: PipelineGroups
    meter: Meter

    def check_map(self, stage_map: StageMap) -> None:
        """Raise `SpecError` unless the map is of this model's layers and this group's ranks."""
        layers, ranks = len(self.boundaries) - 1, self.groups.collective.size
        if stage_map.layers != layers:
            raise SpecError(f"the stage map is of {stage_map.layers} layers, the model has {layers}")
        if max(stage_map.ranks) >= ranks:
            raise SpecError(f"the stage map names rank {max(stage_map.ranks)} of {ranks}")

    def new_layer(self, index: int) -> PipelineLayer:
        """Layer `index` as it is before training."""
        module = self.build_layer(index).to(self.config.device)
        return PipelineLayer(module, index, self.meter, seed=self.config.seed)

    def new_layers(self, stage_map: StageMap) -> dict[int, PipelineLayer]:
        """This rank's layers of `stage_map`, as they are before training."""
        return {i: self.new_layer(i) for i in stage_map.layers_on(self.groups.rank)}

    def build(
        self,
        stage_map: StageMap,
        layers: dict[int, PipelineLayer],
        optimizer: torch.optim.Optimizer | None,
        durations: Durations | None = None,
    ) -> Stages:
        """Torch's stages and schedule for `stage_map`, from this rank's layers; collective over all ranks."""
        self.meter.reset()
        group = self.groups.of_stages(stage_map.used_ranks)
        trains_below = self._trains_below(layers)

        def example(boundary: int) -> Tensor:
            """Metadata of one boundary: a floating-point tensor carries a gradient if a layer below is trainable."""
            meta = self.boundaries[boundary]
            return meta.clone().requires_grad_(trains_below[boundary] and meta.is_floating_point())

        stages = []
        for number in stage_map.stages_on(self.groups.rank):
            members = stage_map.layers_of(number)
            stage = _MeteredStage(
                nn.Sequential(*(layers[i] for i in members)),
                number,
                stage_map.stages,
                self.config.device,
                input_args=example(members.start),
                output_args=example(members.stop),
                group=group,
            )
            stage.meter = self.meter
            stage.trains_before = trains_below[members.start]
            stage.trains = trains_below[members.stop]
            stages.append(stage)
        runtime = self._runtime(stages, stage_map, durations) if stages else None
        return Stages(stage_map=stage_map, layers=layers, optimizer=optimizer, durations=durations, runtime=runtime)

    def _runtime(self, stages: list[_MeteredStage], stage_map: StageMap, durations: Durations | None) -> Any:
        """Torch's runtime for these stages, under the schedule for the whole map."""
        dense = dense_ranks(stage_map)
        if durations is not None and len(durations.forward_s) != dense.stages:
            durations = None
        microbatches = self.config.microbatches
        schedule = flexible(dense.ranks, microbatches, durations=durations, split_backward=self.config.split_backward)
        runtime = _PipelineScheduleRuntime(stages, microbatches, loss_fn=self.meter.timed_loss(self.loss_fn))
        rows = {r: [_Action.from_str(str(a)) for a in row] for r, row in enumerate(schedule.actions)}
        runtime._prepare_schedule_with_comms(rows)
        return runtime

    def _trains_below(self, layers: dict[int, PipelineLayer]) -> list[bool]:
        """Whether any layer below boundary b has a trainable parameter, [L + 1]; collective."""
        mine = torch.zeros(len(self.boundaries) - 1, dtype=torch.int64)
        for i, layer in layers.items():
            mine[i] = int(any(p.requires_grad for p in layer.parameters()))
        op = Operation("finding frozen layers")
        every = self.groups.collective.all_gather(mine.to(self.config.device), op=op).cpu()
        below = every.amax(dim=0).cumsum(0).tolist()
        return [False, *(n > 0 for n in below)]


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
