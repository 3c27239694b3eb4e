"""What runs a stage map: the process groups, and stages with their schedule.

Shape legend: L layers, S stages, P ranks, M microbatches. A rank without a stage has no executor; it takes part in what
all ranks do around a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from pipeline_balance.maps.compare import dense_ranks
from pipeline_balance.pipeline.measure.meter import Meter
from pipeline_balance.pipeline.model.halves_tried import check_halves
from pipeline_balance.pipeline.model.layers import PipelineModel, TrainingPass
from pipeline_balance.pipeline.model.ownership import number_of
from pipeline_balance.pipeline.run.executor import Executor
from pipeline_balance.pipeline.run.failures import Failures
from pipeline_balance.pipeline.run.replicas import Grid
from pipeline_balance.pipeline.run.vocabulary import VocabularyPasses
from pipeline_balance.schedules.actions import Action, Schedule
from pipeline_balance.schedules.named import FLEXIBLE, MakeSchedule, check_choice, schedule_for
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.schedules.transfers import Step, forward_rows, with_messages
from pipeline_balance.schedules.vocabulary import schedule_with_head, shared_rows, sharing
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError
from prophet.ranks.collective import DEFAULT_TIMEOUT_S, Collective
from prophet.ranks.process_group import ProcessGroupCollective
from prophet.ranks.threads import ThreadWorld
from prophet.ranks.works import all_made, like


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """How a pipeline trains; equal on all ranks except `device`.

    Attributes:
        microbatches: How many parts a step's batch is cut into.
        seed: By which layers draw random numbers.
        device: Where this rank computes.
        split_backward: Whether weight gradients are computed apart from input gradients where that fills a wait.
        budget_bytes: Bounds the buffers that a move may take on a rank.
        timeout_s: Bounds every wait for another rank, in seconds.
        schedule: A name or a function, see `schedules.named`; None is "flexible", or what slices bring.
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

    Attributes:
        grid: The processes' places.
        collective: Over the ranks of this replica.
        column: Over the ranks that run the same layers in all replicas.
        experts: Over the processes of a stage that share experts (None: nobody does).
        copies: Over those with the same experts.
        alike: Over those that are given the same tokens, of which each takes a part to its experts.
        shards: Communicators that modules use by themselves.
    """

    grid: Grid
    collective: Collective
    column: Collective
    experts: Collective | None = None
    copies: Collective | None = None
    alike: Collective | None = None
    shards: tuple[Collective, ...] = ()


def alone(rank: int = 0) -> Collective:
    """Make the communicator of a rank with nobody else in it."""
    return ThreadWorld(1).collective(rank)


class PipelineGroups:
    """The communicators of one pipeline, and of its replicas once they are arranged and divided.

    Process r of the group is rank r mod P of replica r // P, until others take their `rank_assignment`.

    Attributes:
        world: Over all ranks.
        collective: Over those of this rank's replica.
        column: Over the ranks that run the same layers in all replicas.
        failures: Makes one rank's failure that of all of them.
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
        self._vocabulary: Collective | None = None
        self._tokens: Collective | None = None
        # one replica, until others are arranged
        self.arrange(1)

    def arrange(self, replicas: int, rank_assignment: RankAssignment | None = None) -> None:
        """Number the ranks for `replicas`, or as `rank_assignment` does; local.

        Raises:
            SpecError: The ranks do not divide into as many replicas.
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
            # torch makes a group only if all ranks call, also those that are not in it
            row, column = (self._part(parts) for parts in (list(grid.rows), columns))
            self.assign(RankAssignment(grid=grid, collective=row, column=column))

    def share_experts(self) -> None:
        """Note that every replica of a stage has another part of its layers' experts."""
        self.assign(replace(self.rank_assignment, grid=replace(self.grid, ep=self.replicas)))

    def assign(self, rank_assignment: RankAssignment) -> None:
        """Have this process run what its place in `rank_assignment` does from now on. Cannot fail."""
        self.rank_assignment, self.grid = rank_assignment, rank_assignment.grid
        # errors name stages by the place of the rank that has failed
        self.failures.grid = rank_assignment.grid
        self.collective, self.column = rank_assignment.collective, rank_assignment.column
        self.replicas = rank_assignment.grid.replicas
        self.replica = rank_assignment.grid.replica_of(self.world.rank)
        self.rank = rank_assignment.grid.pipeline_rank_of(self.world.rank)
        # others were destroyed with the layout that had them
        self._included = [collective for collective in self._included if collective.groups]
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
        made = all_made([partial(dist.new_group, row, **like(self.group, self._limit)) for row in ranks])
        mine = next(g for part, g in zip(parts, made, strict=True) if self.world.rank in part)
        # a rank alone sends nothing, and a process group would only cost its start
        return alone() if dist.get_world_size(mine) == 1 else ProcessGroupCollective(mine, timeout_s=self.timeout_s)

    def include(self, collective: Collective) -> None:
        """Have waits of `collective`, which is over some of the ranks, learn of failures, and fail with `abort`."""
        if isinstance(collective, ProcessGroupCollective) and collective not in self._included:
            collective.watch = self.failures.watch
            self._included.append(collective)

    def abort(self) -> None:
        """Let whatever waits for another rank fail at once; the communicators cannot be used afterwards."""
        for collective in self._included:
            collective.abort()

    def leave(self) -> None:
        """Let go of the present group's communicators, before it is destroyed; `enter` goes on in another one."""
        self._side = self._vocabulary = self._tokens = None
        for collective in self._included:
            collective.close()

    def share_vocabulary(self) -> None:
        """Make the communicator of each replica for a split vocabulary; collective over all ranks."""
        self._vocabulary = self._part(list(self.grid.rows))
        self.include(self._vocabulary)

    @property
    def vocabulary(self) -> Collective:
        """The communicator of this replica's ranks for a split vocabulary alone."""
        assert self._vocabulary is not None
        return self._vocabulary

    def share_tokens(self, context: int) -> Collective:
        """Make the communicators of as many replicas in a row, which share tokens; collective over all ranks.

        Args:
            context: How many; it divides the replicas.
        """
        self.assign(replace(self.rank_assignment, grid=replace(self.grid, context=context)))
        self._tokens = self._part(self.grid.contexts)
        self.include(self._tokens)
        return self._tokens

    def side(self) -> Collective:
        """A separate communicator over all ranks, for use beside a step; made at the first call, by all ranks."""
        if self._side is None:
            # Only members call where the default group has others. Else all do: torch names what members alone make by
            # how many groups a process is in, and those that a job leaves out are in fewer.
            apart = self.group is not None
            group = dist.new_group(self._world, use_local_synchronization=apart, **like(self.group, self._limit))
            self._side = ProcessGroupCollective(group, timeout_s=self.timeout_s)
            self.include(self._side)
        return self._side


@dataclass(frozen=True, kw_only=True)
class Stages:
    """What is in force on one rank.

    Attributes:
        stage_map: Which rank runs which layers.
        executor: Runs this rank's stages; None without one.
        durations: The stages' expected seconds that the schedule was made for (None: not known).
        schedule: A digest of what all ranks run: see `StageBuilder.number`.
    """

    stage_map: StageMap
    executor: Executor | None
    durations: Durations | None = None
    schedule: int = 0


@dataclass(kw_only=True)
class StageBuilder:
    """Makes stages with their schedule for a map; see `ElasticPipeline`.

    Attributes:
        model: The model that the stages run.
        config: The settings in force.
        groups: The pipeline's communicators.
        meter: Times layers and waits.
        on_stage_done: Called with a stage's number after its last backward action of a pass.
    """

    model: PipelineModel
    config: PipelineConfig
    groups: PipelineGroups
    meter: Meter
    on_stage_done: Callable[[int], None] = lambda stage: None

    def first_map(self) -> StageMap:
        """Spread the layers evenly over the ranks."""
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
        vocabulary = self.model.vocabulary
        if vocabulary is not None:
            vocabulary.check(ranks)
            if len(stage_map.used_ranks) < ranks:
                idle = sorted(set(range(ranks)) - set(stage_map.used_ranks))
                raise SpecError(f"split_vocabulary: every rank runs its rows between its stages, and {idle} have none")
        if self.model.slicing is not None:
            if self.config.split_backward:
                raise SpecError("slices need split_backward=False: their backward frees keys and values at once")
            if self.config.schedule is not None:
                raise SpecError("slices bring their schedule: leave out schedule=")
            # slices number the ranks in use from 0, as their schedules do
            self.model.slicing.check(dense_ranks(stage_map).ranks)

    def schedule(
        self, stage_map: StageMap, durations: Durations | None = None, config: PipelineConfig | None = None
    ) -> Schedule:
        """Make what the ranks in use run, [P] rows without idle ranks: the user's choice asked anew, and checked.

        Args:
            stage_map: Which rank runs which layers.
            durations: The stages' expected seconds (None: not known).
            config: The settings (None: those in force).

        Raises:
            SpecError: The schedule cannot be run.
        """
        config, ranks = config or self.config, dense_ranks(stage_map).ranks
        if self.model.slicing is not None:
            made = self.model.slicing.schedule(ranks, config.microbatches)
            return sharing(made) if self.model.vocabulary is not None else made
        # measured with other stages: they say nothing of these
        if durations is not None and len(durations.forward_s) != stage_map.stages:
            durations = None
        choice, split = config.schedule or FLEXIBLE, config.split_backward
        if self.model.vocabulary is not None:
            made = schedule_with_head(choice, ranks, config.microbatches, split_backward=split)
            return sharing(made)
        return schedule_for(choice, ranks, config.microbatches, durations=durations, split_backward=split)

    def number(self, schedule: Schedule) -> int:
        """Digest a schedule for comparing over ranks; 0 for "flexible"."""
        # a rank that joins does not know the durations that "flexible" was made for, and would find another digest
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
        """Make stages for a map; nothing that is in force changes.

        Args:
            stage_map: Which rank runs which layers.
            durations: The stages' expected seconds (None: not known).
            rank: This process's pipeline rank once the stages are in force (None: the one it has).
            config: The settings then (None: those in force).
            schedule: What the ranks run (None: it is asked for).
        """
        rank, config = self.groups.rank if rank is None else rank, config or self.config
        # what was chosen is compared over all ranks, so it is not asked for a second time
        schedule = schedule or self.schedule(stage_map, durations, config)
        mine = stage_map.stages_on(rank)
        # a rank without a stage takes part in what all ranks do around a step, and runs nothing
        executor = self._executor(stage_map, schedule, rank, config) if mine else None
        return Stages(stage_map=stage_map, executor=executor, durations=durations, schedule=self.number(schedule))

    def _executor(self, stage_map: StageMap, schedule: Schedule, rank: int, config: PipelineConfig) -> Executor:
        # schedules number the ranks in use from 0; messages go to ranks as they are
        used = stage_map.used_ranks

        def spread(rows: list[list[Action]]) -> list[list[Action]]:
            """Rows of the ranks in use at their ranks' places."""
            return [rows[used.index(r)] if r in used else [] for r in range(max(used) + 1)]

        vocabulary: VocabularyPasses | None = None
        if self.model.vocabulary is not None:
            first, last = stage_map.ranks[0], stage_map.ranks[-1]
            vocabulary = VocabularyPasses(self.model.vocabulary, lambda: self.groups.vocabulary, first, last)
        # attention is exchanged in passes alone
        passes = schedule.passes()

        def evaluation(units: int) -> list[Step]:
            rows: list[list[Action]] = forward_rows(stage_map.ranks, units)
            if vocabulary is not None:
                rows = shared_rows(rows, stage_map.stages)
            return with_messages(rows, stage_map.ranks)[rank]

        return Executor(
            self.model,
            {s: stage_map.layers_of(s) for s in stage_map.stages_on(rank)},
            stage_map.stages,
            training=with_messages(spread([list(row) for row in schedule.actions]), stage_map.ranks)[rank],
            evaluation=evaluation,
            # asked anew: stages are built before the communicators that they will use are in force
            collective=lambda: self.groups.collective,
            failures=lambda: self.groups.failures,
            config_seed=config.seed,
            device=config.device,
            meter=self.meter,
            on_stage_done=self.on_stage_done,
            training_pass=lambda parts: TrainingPass(
                schedule=passes,
                ranks=used,
                stages=[stage_map.layers_of(s) for s in range(stage_map.stages)],
                collective=self.groups.collective,
                parts=parts,
            ),
            reuse=schedule.slices > 1,
            vocabulary=vocabulary,
        )
