"""What a controller balances: stages on P ranks, which it has measured, prepared and changed.

Shape legend: P ranks, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pipeline_balance.schedules.simulate import Durations
from pipeline_balance.spec import StageMap
from prophet.ranks.collective import Collective

if TYPE_CHECKING:
    from pipeline_balance.pipeline.move.transaction import Prepared, Switched
    from pipeline_balance.pipeline.trainer import ElasticPipeline


class BalancedStages(Protocol):
    """The stages that a controller balances; equal on all ranks."""

    @property
    def ranks(self) -> int:
        """P: ranks that may run a stage."""

    @property
    def first_ranks(self) -> int:
        """How many ranks the run began with, which `repack_slowdown` compares with."""

    @property
    def stage_map(self) -> StageMap:
        """The map in force, of L layers on P ranks."""

    @property
    def microbatches(self) -> int:
        """Microbatches of a step that pass every stage."""

    @property
    def slices(self) -> int:
        """Slices of a microbatch; 1: it passes whole."""

    def prepare(self, stage_map: StageMap, collective: Collective) -> Prepared | None:
        """Do ahead what a change needs, in a thread beside a step; collective.

        Where it sends state early, the change is made before this step's update.
        """

    def change(self, stage_map: StageMap, durations: Durations, prepared: Prepared | None) -> Switched:
        """Go to `stage_map`, between two steps or before an update; collective.

        Args:
            stage_map: The map to go to.
            durations: Expected seconds of its stages.
            prepared: What `prepare` made for this map.
        """


@dataclass(frozen=True)
class PipelineStages:
    """All stages of a pipeline, changed by its `rebuild`."""

    pipeline: ElasticPipeline

    @property
    def ranks(self) -> int:
        return self.pipeline.ranks

    @property
    def first_ranks(self) -> int:
        return self.pipeline.progress.first_ranks

    @property
    def stage_map(self) -> StageMap:
        return self.pipeline.stage_map

    @property
    def microbatches(self) -> int:
        return self.pipeline.config.microbatches

    @property
    def slices(self) -> int:
        slicing = self.pipeline.model.slicing
        return slicing.slices if slicing is not None else 1

    def prepare(self, stage_map: StageMap, collective: Collective) -> Prepared | None:
        return self.pipeline.prepare(stage_map, collective, early=True)

    def change(self, stage_map: StageMap, durations: Durations, prepared: Prepared | None) -> Switched:
        # what `rebuild` raises is raised on all ranks, so a controller needs no agreement around it
        return self.pipeline.rebuild(stage_map, durations=durations, prepared=prepared)
