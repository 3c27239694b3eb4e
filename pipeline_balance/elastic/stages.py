"""What balances a job's stages through its layouts: one controller, for every layout that has stages to balance.

The controller numbers the stages' ranks as the layout did that was asked for: its columns, the processes of one stage.
A stage map that empties columns is a layout of fewer stages, and the columns wait for another one.

Shape legend: N processes, P columns of the layout that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from pipeline_balance.control.controller import Controller
from pipeline_balance.control.decide import ControllerConfig
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.maps.partition import partition_by_time
from pipeline_balance.pipeline.move.transaction import Prepared, Switched
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import PartitionError, RankLimits, StageMap
from prophet.errors import SpecError
from prophet.ranks.collective import Collective

Switch = Callable[[Parallelism, Durations], Switched]
"""Takes the job to a layout whose stages are expected to take so long."""


def check_stages(config: object, limits: Sequence[RankLimits] | None, world: int) -> None:
    """Raise `SpecError` unless `config` and `limits` can balance the stages of `world` processes."""
    if config is not None and not isinstance(config, ControllerConfig):
        raise SpecError(f"balance_stages: expected a pipeline_balance.ControllerConfig, got {config!r:.100}")
    if limits is not None and config is None:
        raise SpecError("limits say what stages may need: give balance_stages, too")
    if limits is not None and not all(isinstance(one, RankLimits) for one in limits):
        raise SpecError(f"limits: expected a pipeline_balance.spec.RankLimits for each process, got {limits!r:.100}")
    if limits is not None and len(limits) != world:
        raise SpecError(f"limits: expected one entry for each of {world} processes, got {len(limits)}")


class JobStages:
    """Balances the stages of a job by `config`; None balances nothing. `limits` [N] are of processes.

    It is what its controller changes. With one stage, with several chunks per stage, and with tp, whose layers nobody
    times, stages rest.
    """

    def __init__(
        self,
        pipeline: ElasticPipeline,
        config: ControllerConfig | None,
        limits: Sequence[RankLimits] | None,
        to: Switch,
    ) -> None:
        self.pipeline, self.config, self._limits, self._switch = pipeline, config, limits, to
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
            self.pipeline.meter.enabled = False  # nobody reads it
            return
        self.first_ranks = layout.pp
        if self.controller is None:
            self.controller = Controller(self.pipeline, self._of_columns(layout), self.config, stages=self)
        else:
            self.controller.restart(self._of_columns(layout))

    def around(self, train: Callable[[], float], *, update: bool) -> float:
        """What `train` returns, which is one step of the job's pipeline."""
        if self._resting or self.controller is None:
            return train()
        return self.controller.around(train, update=update)

    def filled(self, layout: Parallelism, microbatches: int) -> Parallelism:
        """The layout with the stages that suit the last costs, where it leaves them open and there are costs."""
        costs = self.controller.costs if self.controller is not None else ()
        if not costs or layout.stages is not None or layout.pp == 1 or layout.v > 1:
            return layout
        limits = self._of_columns(layout) if not isinstance(layout.order, str) else RankLimits.uniform(layout.pp)
        try:
            found = partition_by_time(costs, limits, microbatches=microbatches)
        except PartitionError:
            return layout
        return replace(layout, stages=_layers(found))

    def _of_columns(self, layout: Parallelism) -> tuple[RankLimits, ...]:
        """What every stage of a layout may need, [pp]: the least of its processes."""
        if self._limits is None:
            return RankLimits.uniform(layout.pp)
        every = [[self._limits[int(r)] for r in column.ravel()] for column in layout.grid]
        return tuple(
            RankLimits(memory_bytes=min(r.memory_bytes for r in row), speed=min(r.speed for r in row)) for row in every
        )

    # --- what the controller balances: see `BalancedStages` -----------------------------------------------------

    @property
    def ranks(self) -> int:
        return self._asked.pp

    @property
    def stage_map(self) -> StageMap:
        now = self.pipeline.stage_map
        return StageMap(now.boundaries, tuple(self._used[r] for r in now.ranks))

    @property
    def microbatches(self) -> int:
        return self.pipeline.config.microbatches

    @property
    def slices(self) -> int:
        return self._asked.slices

    def prepare(self, stage_map: StageMap, collective: Collective) -> Prepared | None:
        return None  # the switch finds its route itself: preparing one is the main thread's

    def change(self, stage_map: StageMap, durations: Durations, prepared: Prepared | None) -> Switched:
        done = self._switch(self._layout(stage_map), durations)
        self._used = stage_map.ranks
        return done

    def _layout(self, stage_map: StageMap) -> Parallelism:
        """The layout whose stages are those of `stage_map`, on these columns."""
        order = np.concatenate([self._asked.grid[r].ravel() for r in stage_map.ranks]).tolist()
        return replace(self._asked, pp=len(stage_map.ranks), stages=_layers(stage_map), order=tuple(order))


def _layers(stage_map: StageMap) -> tuple[int, ...]:
    return tuple(b - a for a, b in pairwise(stage_map.boundaries))
