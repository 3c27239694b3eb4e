"""What ranks compare of the way they cut microbatches into slices, before anything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline_balance.pipeline.training_state import gather_json
from prophet.errors import SpecError
from prophet.ranks.collective import Collective, Operation

if TYPE_CHECKING:
    from pipeline_balance.pipeline.model import Slicing
    from pipeline_balance.pipeline.stages import PipelineConfig


def agree_on_slicing(slicing: Slicing | None, config: PipelineConfig, collective: Collective) -> None:
    """Raise `SpecError` on all ranks unless all cut microbatches into slices alike; collective."""
    op = Operation("comparing the ranks' slices")
    every = gather_json([str(slicing), config.split_backward], collective, config.device, op)
    differ = [r for r, said in enumerate(every) if said[0] != every[0][0]]
    if differ:
        raise SpecError(f"ranks {differ} cut microbatches by {every[differ[0]][0]}, rank 0 by {every[0][0]}")
    if slicing is not None and any(said[1] for said in every):
        raise SpecError("slices need split_backward=False: their backward frees keys and values at once")
