"""What runs a stage map: the process groups, and stages with their schedule.

Shape legend: L layers, S stages, P ranks, M microbatches. A rank without a stage has no executor; it takes part in what
all ranks do around a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from pipeline_balance.maps.compare import dense_ranks
from pipeline_balance.pipeline.measure.meter import Meter
from pipeline_balance.pipeline.model.halves_tried import check_halves
from pipeline_balance.pipeline.model.layers import PipelineModel
from pipeline_balance.pipeline.model.ownership import number_of
from pipeline_balance.pipeline.run.executor import Executor
from pipeline_balance.pipeline.run.failures import Failures
from pipeline_balance.pipeline.run.replicas import Grid
from pipeline_balance.schedules.actions import Action, Schedule
from pipeline_balance.schedules.named import FLEXIBLE, MakeSchedule, check_choice, schedule_for
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.schedules.transfers import forward_rows, with_messages
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from prophet.ranks.collective import DEFAULT_TIMEOUT_S, Collective
from prophet.ranks.process_group import ProcessGroupCollective
from prophet.ranks.threads import ThreadWorld
from prophet.ranks.works import all_made


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """How a pipeline trains; equal on all ranks except `device`.

    `microbatches` is how many parts a step's batch is cut into. Layers draw random numbers by `seed`. `split_backward`
    computes weight gradients apart from input gradients where that fills a wait. `budget_bytes` bounds the buffers that
    a move may take on a rank, and `timeout_s` every wait for another rank. `schedule` is a name or a function, see
    `schedules.named`; None is "flexible", or what slices bring.
    """

    microbatches: int
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    split_backward: bool = False
    budget_bytes: int = 64 << 20
    timeout_s: float = DEFAULT_TIMEOUT_S
    schedule: str | MakeSchedule | None = None

    def __post_init__(self) -> None:
        for name in ("microbatches", "budget_bytes", "timeout_s"):
            if not getattr(self, name) > 0:
                raise SpecError(f"{name} must be positive, got {getattr(self, name)}")
        if self.split_backward:
            check_halves()
        if self.schedule is not None:
            check_choice(self.schedule)


@dataclass(frozen=True, kw_only=True)
class RankAssignment:
    """Which process runs which stages of which replica, and this one's communicators: see `PipelineGroups`.

    `shards` are those that modules use by themselves. Where processes of a stage share experts, `experts` is over
    these, and `copies` over those with the same experts. `alike` are those that are given the same tokens, of which
    each takes a part to its experts.
    """

    grid: Grid
    collective: Collective
    column: Collective
    experts: Collective | None = None
    copies: Collective | None = None
    alike: Collective | None = None
    shards: tuple[Collective, ...] = ()


def alone(rank: int = 0) -> Collective:
    """Communication of a rank with nobody."""
    return ThreadWorld(1).collective(rank)


class PipelineGroups:
    """The communicators of one pipeline, and of its replicas once they are arranged and divided.

    `world` is over all ranks, `collective` over those of this rank's replica, `column` over the ranks that run the same
    layers in all replicas. Process r of the group is rank r mod P of replica r // P, until others take their
    `rank_assignment`.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._limit = timedelta(seconds=timeout_s)
        self.enter(group)

    def enter(self, group: dist.ProcessGroup | None) -> None:
        """Use `group` (None: all processes) from now on, for one replica."""
        self.group = group
        self.world: Collective = (own := ProcessGroupCollective(group, timeout_s=self.timeout_s))
        self.failures = Failures(own, self.abort)
        self._included = [own]
        self._world = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self._side: Collective | None = None
        self.arrange(1)

    def arrange(self, replicas: int, rank_assignment: RankAssignment | None = None) -> None:
        """Number the ranks for `replicas`, or as `rank_assignment` do; local. Raises `SpecError` unless they divide
        into them.
        """
        self.assign(
            rank_assignment
            or RankAssignment(grid=Grid.of(self.world.size, replicas), collective=self.world, column=alone())
        )

    def divide(self) -> None:
        """Make the communicators of replicas and columns; collective, with the same grid on all ranks."""
        grid = self.grid
        if grid.replicas > 1:
            columns = [grid.column(p) for p in range(grid.pipeline_ranks)]
            row, column = (self._part(parts) for parts in (list(grid.rows), columns))
            self.assign(RankAssignment(grid=grid, collective=row, column=column))

    def assign(self, rank_assignment: RankAssignment) -> None:
        """Have this process run what its place in `rank_assignment` does from now on. Cannot fail."""
        self.rank_assignment, self.grid = rank_assignment, rank_assignment.grid
        self.failures.grid = rank_assignment.grid
        self.collective, self.column = rank_assignment.collective, rank_assignment.column
        self.replicas = rank_assignment.grid.replicas
        self.replica = rank_assignment.grid.replica_of(self.world.rank)
        self.rank = rank_assignment.grid.pipeline_rank_of(self.world.rank)
        beside = (rank_assignment.experts, rank_assignment.copies, rank_assignment.alike, *rank_assignment.shards)
        for collective in (rank_assignment.collective, rank_assignment.column, *beside):
            if collective is not None:
                self.include(collective)

    @property
    def spare(self) -> bool:
        """Whether this process has no place in any replica."""
        return self.replica == self.replicas

    def _part(self, parts: list[tuple[int, ...]]) -> Collective:
        """Among groups that all ranks make in the same order, the one of this rank."""
        ranks = [[self._world[r] for r in part] for part in parts]
        made = all_made([partial(dist.new_group, row, timeout=self._limit) for row in ranks])
        mine = next(g for part, g in zip(parts, made, strict=True) if self.world.rank in part)
        return alone() if dist.get_world_size(mine) == 1 else ProcessGroupCollective(mine, timeout_s=self.timeout_s)

    def include(self, collective: Collective) -> None:
        """Waits of `collective`, which is over some of the ranks, hear of failures, and fail with `abort`."""
        if isinstance(collective, ProcessGroupCollective) and collective not in self._included:
            collective.watch = self.failures.watch
            self._included.append(collective)

    def abort(self) -> None:
        """Let whatever waits for another rank fail at once; the communicators cannot be used afterwards."""
        for collective in self._included:
            collective.abort()

    def leave(self) -> None:
        """Let go of the present group's communicators, before it is destroyed; `enter` goes on in another one."""
        if self._side is not None:
            self._side.close()
            self._side = None
        self.world.close()

    def side(self) -> Collective:
        """A separate communicator over all ranks, for use beside a step; made at the first call, by all ranks."""
        if self._side is None:
            group = dist.new_group(self._world, timeout=self._limit, use_local_synchronization=True)
            self._side = ProcessGroupCollective(group, timeout_s=self.timeout_s)
            self.include(self._side)
        return self._side


@dataclass(frozen=True, kw_only=True)
class Stages:
    """What is in force on one rank: the stage map, and the executor of this rank's stages (None without one).

    `durations` are the stages' expected seconds that the schedule was made for, None where they are not known.
    `schedule` is a digest of what all ranks run: see `StageBuilder.number`.
    """

    stage_map: StageMap
    executor: Executor | None
    durations: Durations | None = None
    schedule: int = 0


@dataclass(kw_only=True)
class StageBuilder:
    """Makes stages with their schedule for a map; see `ElasticPipeline`. `config` is what is in force."""

    model: PipelineModel
    config: PipelineConfig
    groups: PipelineGroups
    meter: Meter
    on_stage_done: Callable[[int], None] = lambda stage: None

    def first_map(self) -> StageMap:
        """Layers spread evenly over the ranks."""
        ranks, layers = self.groups.grid.pipeline_ranks, len(self.model.units)
        each = self.model.slicing.stages_per_rank if self.model.slicing is not None else 1
        even = StageMap.even(layers, ranks * each)
        return StageMap(even.boundaries, tuple(s % ranks for s in range(even.stages)))

    def check_map(self, stage_map: StageMap, grid: Grid | None = None) -> None:
        """Raise `SpecError` unless the map is of this model's layers and of this group's ranks, or of the `grid`'s."""
        layers, ranks = len(self.model.units), (grid or self.groups.grid).pipeline_ranks
        if stage_map.layers != layers:
            raise SpecError(f"the stage map is of {stage_map.layers} layers, the model has {layers}")
        if max(stage_map.ranks) >= ranks:
            raise SpecError(f"the stage map names rank {max(stage_map.ranks)} of {ranks}")
        if self.model.slicing is not None:
            if self.config.split_backward:
                raise SpecError("slices need split_backward=False: their backward frees keys and values at once")
            if self.config.schedule is not None:
                raise SpecError("slices bring their schedule: leave out schedule=")
            self.model.slicing.check(dense_ranks(stage_map).ranks)

    def schedule(
        self, stage_map: StageMap, durations: Durations | None = None, config: PipelineConfig | None = None
    ) -> Schedule:
        """What the ranks in use run, [P] rows without idle ranks: the user's choice asked anew, and checked.

        Raises `SpecError` where it cannot be run.
        """
        config, ranks = config or self.config, dense_ranks(stage_map).ranks
        if self.model.slicing is not None:
            return self.model.slicing.schedule(ranks, config.microbatches)
        if durations is not None and len(durations.forward_s) != stage_map.stages:
            durations = None
        choice, split = config.schedule or FLEXIBLE, config.split_backward
        return schedule_for(choice, ranks, config.microbatches, durations=durations, split_backward=split)

    def number(self, schedule: Schedule) -> int:
        """A digest for comparing over ranks; 0 of "flexible", as a rank that joins does not know its durations."""
        return number_of(str(schedule)) if self.config.schedule not in (None, FLEXIBLE) else 0

    def build(
        self,
        stage_map: StageMap,
        durations: Durations | None = None,
        *,
        rank: int | None = None,
        config: PipelineConfig | None = None,
        schedule: Schedule | None = None,
    ) -> Stages:
        """Stages for `stage_map` with their `schedule`, asked for if None; nothing that is in force changes.

        With `rank` and `config`, those of this process once both are in force.
        """
        rank, config = self.groups.rank if rank is None else rank, config or self.config
        schedule = schedule or self.schedule(stage_map, durations, config)  # what was chosen is compared over all ranks
        mine = stage_map.stages_on(rank)
        executor = self._executor(stage_map, schedule, rank, config) if mine else None
        return Stages(stage_map=stage_map, executor=executor, durations=durations, schedule=self.number(schedule))

    def _executor(self, stage_map: StageMap, schedule: Schedule, rank: int, config: PipelineConfig) -> Executor:
        used = stage_map.used_ranks

        def spread(rows: list[list[Action]]) -> list[list[Action]]:
            """Rows of the ranks in use at their ranks' places."""
            return [rows[used.index(r)] if r in used else [] for r in range(max(used) + 1)]

        return Executor(
            self.model,
            {s: stage_map.layers_of(s) for s in stage_map.stages_on(rank)},
            stage_map.stages,
            training=with_messages(spread([list(row) for row in schedule.actions]), stage_map.ranks)[rank],
            evaluation=lambda n: with_messages(forward_rows(stage_map.ranks, n), stage_map.ranks)[rank],
            collective=lambda: self.groups.collective,
            failures=lambda: self.groups.failures,
            config_seed=config.seed,
            device=config.device,
            meter=self.meter,
            on_stage_done=self.on_stage_done,
            reuse=schedule.slices > 1,
        )
