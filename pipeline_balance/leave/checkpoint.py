"""A pipeline's training state through a checkpoint, written by one set of ranks and read by any other."""

from __future__ import annotations

from pathlib import Path

from pipeline_balance.pipeline.saved import Also, Checkpoint, Stateful, read_checkpoint
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.state.checkpoint_folder import DESCRIPTION

__all__ = ["DESCRIPTION", "Checkpoint", "Stateful", "load_checkpoint", "read_checkpoint", "save_checkpoint"]


def save_checkpoint(
    pipeline: ElasticPipeline, folder: str | Path, *, step: int, stage_map: StageMap | None = None, also: Also = None
) -> None:
    """Write parameters, buffers, optimizers with their groups, and the run's counters; collective, between updates.

    Names are the unsplit model's. `stage_map` is for the run that reads it, on any number of ranks (None: the one in
    force). `also` holds schedulers and the like, equal on all ranks, by a name of yours. The checkpoint that is in the
    folder is replaced when the new one is whole, and not before. Raises `SpecError` on all ranks where it cannot be
    written.
    """
    after = stage_map if stage_map is not None else pipeline.stage_map
    pipeline.save(pipeline.reseater(), folder, step=step, stage_map=after, also=also)


def load_checkpoint(pipeline: ElasticPipeline, folder: str | Path, *, also: Also = None) -> Checkpoint:
    """Take over the state that other ranks, of any number, have saved; collective, between updates.

    The pipeline keeps its own stage map (build it with `read_checkpoint(folder).stage_map` to use the saved one).
    `also` gets what was saved under the same names. Raises `SpecError` on a checkpoint of another model or other
    optimizer groups, with the pipeline as it was.
    """
    return pipeline.load(pipeline.reseater(), pipeline.in_force(), folder, also=also)
