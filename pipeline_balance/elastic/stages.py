"""What balances a job's stages through its layouts: one controller, for every layout that has stages to balance.

The controller numbers the stages' ranks as the layout did that was asked for: its columns, the processes of one stage.
A stage map that empties columns is a layout of fewer stages, and the columns wait for another one.

Shape legend: N processes, P columns of the layout that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

import numpy as np

from pipeline_balance.control.controller import Controller
from pipeline_balance.control.decide import ControllerConfig
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.maps.partition import partition_by_time
from pipeline_balance.pipeline.measure.slice_costs import unit_costs
from pipeline_balance.pipeline.move.transaction import Prepared, Switched
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import PartitionError, RankLimits, StageMap
from prophet.errors import SpecError
from prophet.ranks.collective import Collective


class Switch(Protocol):
    """Takes a job to a layout that its controller chose."""

    def change_stages(self, layout: Parallelism, durations: Durations) -> Switched:
        """Go to a layout whose stages are expected to take so long; between steps."""

    def move_stages(
        self, layout: Parallelism, stage_map: StageMap, durations: Durations, prepared: Prepared
    ) -> Switched:
        """Go to other stages of the same processes, before a step's update.

        Args:
            layout: The one in force with other stages.
            stage_map: These, with the pipeline's numbers.
            durations: How long they are expected to take.
            prepared: What the pipeline has made ahead.
        """


def check_stages(config: object, limits: Sequence[RankLimits] | None, world: int) -> None:
    """Raise `SpecError` unless `config` and `limits` can balance the stages of a job.

    Args:
        config: As `Job` takes it for `balance_stages`; None balances nothing.
        limits: Memory and speed of every process [N]; None: not limited.
        world: N, how many processes there are.
    """
    if config is not None and not isinstance(config, ControllerConfig):
        raise SpecError(f"balance_stages: expected a pipeline_balance.ControllerConfig, got {config!r:.100}")
    if limits is not None and config is None:
        raise SpecError("limits say what stages may need: give balance_stages, too")
    if limits is not None and not all(isinstance(one, RankLimits) for one in limits):
        raise SpecError(f"limits: expected a pipeline_balance.spec.RankLimits for each process, got {limits!r:.100}")
    if limits is not None and len(limits) != world:
        raise SpecError(f"limits: expected one entry for each of {world} processes, got {len(limits)}")


class JobStages:
    """Balances the stages of a job; it is what its `Controller` changes.

    With one stage, with several chunks per stage, and with tp, whose layers nobody times, stages rest.

    Args:
        pipeline: Runs the job.
        config: When to move layers; None balances nothing.
        limits: Memory and speed of every process [N]; None: not limited.
        to: Takes the job there.
    """

    def __init__(
        self,
        pipeline: ElasticPipeline,
        config: ControllerConfig | None,
        limits: Sequence[RankLimits] | None,
        to: Switch,
    ) -> None:
        self.pipeline, self.config, self._limits, self._to = pipeline, config, limits, to
        self.controller: Controller | None = None
        self.first_ranks = 0
        self._asked = Parallelism()
        self._used: tuple[int, ...] = (0,)
        self._resting = True

    def begin(self, layout: Parallelism) -> None:
        """Balance the stages of a layout that was asked for, and is in force; on all processes."""
        self._asked, self._used = layout, tuple(range(layout.pp))
        if self.config is None:
            return
        self._resting = layout.pp == 1 or layout.v > 1 or layout.tp > 1
        if self._resting:
            # Nobody reads its samples
            self.pipeline.meter.enabled = False
            return
        self.first_ranks = layout.pp
        # one controller for the whole job: it keeps what it has learned and its report
        if self.controller is None:
            self.controller = Controller(self.pipeline, self._of_columns(layout), self.config, stages=self)
        else:
            self.controller.restart(self._of_columns(layout))

    def around(self, train: Callable[[], float], *, update: bool) -> float:
        """Train one step by `train`, and move layers first where that pays. Returns what `train` returns."""
        if self._resting or self.controller is None:
            return train()
        return self.controller.around(train, update=update)

    def filled(self, layout: Parallelism, microbatches: int) -> Parallelism:
        """The layout with the stages that suit the last costs, where it leaves them open and there are costs."""
        costs = self.controller.costs if self.controller is not None else ()
        if not costs or layout.stages is not None or layout.pp == 1 or layout.v > 1:
            return layout
        # while the order is open nobody knows which processes a column has
        limits = self._of_columns(layout) if not isinstance(layout.order, str) else RankLimits.uniform(layout.pp)
        try:
            # measured in another layout, perhaps, which had other slices
            of_units = unit_costs(costs, layout.slices)
            found = partition_by_time(of_units, limits, microbatches=microbatches * layout.slices)
        # no stage map keeps to the limits: the layout stays as it was asked for
        except PartitionError:
            return layout
        return replace(layout, stages=_layers(found))

    def _of_columns(self, layout: Parallelism) -> tuple[RankLimits, ...]:
        """What every stage of a layout may need, [pp]: the least of its processes."""
        if self._limits is None:
            return RankLimits.uniform(layout.pp)
        # a stage is as fast, and as large, as its weakest process
        every = [[self._limits[int(r)] for r in column.ravel()] for column in layout.grid]
        return tuple(
            RankLimits(memory_bytes=min(r.memory_bytes for r in row), speed=min(r.speed for r in row)) for row in every
        )

    # --- what the controller balances: see `BalancedStages` -----------------------------------------------------

    @property
    def ranks(self) -> int:
        """How many columns there are, empty ones included."""
        return self._asked.pp

    @property
    def stage_map(self) -> StageMap:
        # the pipeline counts the stages in use; the controller counts all columns that were asked for
        """Which column runs which layers now."""
        now = self.pipeline.stage_map
        return StageMap(now.boundaries, tuple(self._used[r] for r in now.ranks))

    @property
    def microbatches(self) -> int:
        """Of one replica."""
        return self.pipeline.config.microbatches

    @property
    def slices(self) -> int:
        """Slices per microbatch."""
        return self._asked.slices

    def prepare(self, stage_map: StageMap, collective: Collective) -> Prepared | None:
        """Send ahead what a move within the step needs; None where layers move by a switch, between steps.

        Args:
            stage_map: Layers of every column.
            collective: Over all processes, for use beside a step.
        """
        # other columns are another layout with groups of its own, and a switch finds its route itself
        if stage_map.ranks != self.stage_map.ranks:
            return None
        # what owners keep of experts is named after their replicas, and may have an owner in another one next
        grid = self.pipeline.groups.grid
        if self.pipeline.owners.zero and 1 < grid.ep < grid.replicas:
            return None
        return self.pipeline.prepare(self._of_pipeline(stage_map), collective, early=True)

    def change(self, stage_map: StageMap, durations: Durations, prepared: Prepared | None) -> Switched:
        """Take the job to a layout with these stages; collective over all processes.

        Args:
            stage_map: Layers of every column.
            durations: How long its stages are expected to take.
            prepared: What `prepare` returned; used within a step.
        """
        layout = self._layout(stage_map)
        if self.pipeline.within_step and prepared is not None:
            return self._to.move_stages(layout, self._of_pipeline(stage_map), durations, prepared)
        done = self._to.change_stages(layout, durations)
        # after the switch: where it fails, the old columns are still in use
        self._used = stage_map.ranks
        return done

    def _of_pipeline(self, stage_map: StageMap) -> StageMap:
        """The same with the pipeline's numbers of the stages in use."""
        return StageMap(stage_map.boundaries, self.pipeline.stage_map.ranks)

    def _layout(self, stage_map: StageMap) -> Parallelism:
        """The layout whose stages are those of `stage_map`, on these columns."""
        # columns that got no stage are left out: their processes become spare
        order = np.concatenate([self._asked.grid[r].ravel() for r in stage_map.ranks]).tolist()
        return replace(self._asked, pp=len(stage_map.ranks), stages=_layers(stage_map), order=tuple(order))


def _layers(stage_map: StageMap) -> tuple[int, ...]:
    return tuple(b - a for a, b in pairwise(stage_map.boundaries))
