"""A job in files: saved in one layout, read in any other, on any number of processes.

Loading is a switch whose state comes from files: the layout in force says which boxes a process is to have, so what is
put in force is what a switch to that layout would have put there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline_balance.elastic.balance import Balance
from pipeline_balance.elastic.data import GlobalBatches
from pipeline_balance.elastic.shards.job_state import ShardedLayout
from pipeline_balance.elastic.switching import Switching
from pipeline_balance.pipeline.move.files import Also, Checkpoint, load_state, save_state
from pipeline_balance.pipeline.run.agreement import from_all
from pipeline_balance.pipeline.run.stages import PipelineConfig
from prophet.errors import SpecError
from prophet.ranks.operation import Operation

POSITION, SEED, MEMORIES = "position", "seed", "balancing"


def save_job(switching: Switching, folder: str | Path, position: int, also: Also) -> None:
    """Write a job's checkpoint; see `Job.save`. Collective.

    Args:
        switching: Knows the layout in force, and what balancing has learned.
        folder: Where to; a checkpoint that is there is replaced once the new one is whole.
        position: How far the data is, in samples.
        also: The user's own objects to be saved, by name.
    """
    pipe, experts = switching.pipeline, switching.experts
    # a checkpoint may be read on other ranks, so one process must write what all groups remember
    memory = experts.export_memory(switching.layout)
    with pipe.failures.during(f"saving before step {pipe.progress.updates}", pipe.stage_map):
        op = Operation("collecting what balancing remembers")
        experts.learn(from_all(lambda: memory, pipe.collective, op))
    run = {POSITION: position, SEED: pipe.config.seed, MEMORIES: experts.kept()}
    pipeline_state = switching.state(switching.layout)
    save_state(pipeline_state, folder, step=pipe.progress.updates, stage_map=pipe.stage_map, also=also, run=run)


def load_job(switching: Switching, folder: str | Path, data: GlobalBatches, also: Also) -> None:
    """Put a checkpoint in force in the present layout; see `Job.load`. Collective.

    Args:
        switching: Knows the layout in force.
        folder: What `save_job` wrote.
        data: Goes to the position that was saved.
        also: Gets what was saved under the same names.
    """
    # after a failure the old communicators may be stuck in an exchange that never ends
    if switching.pipeline.failures.error is not None:
        switching.renew()
    # Balancing may make groups, too, and all processes must make them in one order
    switching.groups.idle()
    pipe, layout, plain = switching.pipeline, switching.layout, switching.adapters.plain
    pipeline_state = switching.state(layout)
    model = pipe.model if switching.shards is None else plain
    target = switching.training_layout(
        layout, layout.stage_map(len(pipe.model.units)), switching.rules, model, pipeline_state
    )
    # filled by `check`, which may fail, and called by `put`, which may not
    ready: list[Callable[[], None]] = []

    def check(saved: Checkpoint) -> None:
        _check(saved.run, folder)
        if problem := pipeline_state.refusal():
            raise SpecError(problem)
        # a trial: raises here, while nothing has changed yet
        Balance(None).keep(saved.run[MEMORIES])
        ready.append(data.reach(saved.run[POSITION]))

    def put() -> None:
        ready[0]()
        switching.shards = target if isinstance(target, ShardedLayout) else None

    def draws(saved: Checkpoint, config: PipelineConfig) -> PipelineConfig:
        return replace(config, seed=saved.run[SEED])

    saved = load_state(pipeline_state, target, folder, also=also, check=check, configured=draws, then=[put])
    # before `balance`, which hands the memories to a new engine
    switching.experts.keep(saved.run[MEMORIES])
    switching.balance()


def _check(run: Mapping[str, Any], folder: str | Path) -> None:
    """Raise `SpecError` unless a checkpoint says how far the job was."""
    for name, least in ((POSITION, 0), (SEED, -1 << 63)):
        value = run.get(name)
        # the file is anybody's: `True` is an int, and a seed must fit into 64 bits
        if type(value) is not int or not least <= value < 1 << 63:
            raise SpecError(f"{folder}: run.{name}: expected a whole number, as job.save writes it, got {value!r:.60}")
    if not isinstance(run.get(MEMORIES), dict):
        raise SpecError(f"{folder}: run.{MEMORIES}: expected what balancing remembers, got {run.get(MEMORIES)!r:.60}")
