"""A job in files: saved in one layout, read in any other, on any number of processes.

Loading is a switch whose state comes from files: the layout in force says which boxes a process is to have, so what is
put in force is what a switch to that layout would have put there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline_balance.elastic.balance import Balance
from pipeline_balance.elastic.groups import Groups, met
from pipeline_balance.elastic.reshape import ShardedArrangement
from pipeline_balance.pipeline.agreement import from_all
from pipeline_balance.pipeline.saved import Also, Checkpoint
from prophet.errors import SpecError
from prophet.ranks.collective import Operation
from prophet.ranks.process_group import at_work

if TYPE_CHECKING:
    from pipeline_balance.elastic.job import Job

POSITION, SEED, MEMORIES = "position", "seed", "balancing"


def save_job(job: Job, folder: str | Path, also: Also) -> None:
    """See `Job.save`."""
    pipe = job.pipeline
    told = job._balance.told(job.layout)
    with pipe.failures.during(f"saving before step {job.steps}", pipe.stage_map):
        op = Operation("collecting what balancing remembers")
        job._balance.learn(from_all(lambda: told, pipe.collective, pipe.config.device, op))
    run = {POSITION: job.data.position, SEED: pipe.config.seed, MEMORIES: job._balance.kept()}
    how = job._reseater(job.layout)
    pipe.save(how, folder, step=job.steps, stage_map=pipe.stage_map, also=also, run=run)


def load_job(job: Job, folder: str | Path, also: Also) -> None:
    """See `Job.load`."""
    if job.pipeline.failures.error is not None:
        _renew(job)
    job._groups.idle()  # balancing may make groups, too
    pipe, layout = job.pipeline, job.layout
    how = job._reseater(layout)
    model = pipe.model if job._shards is None else job._plain
    target = job._arrangement(layout, layout.stage_map(len(pipe.model.units)), job._rules, model, how)
    ready: list[Callable[[], None]] = []

    def check(saved: Checkpoint) -> None:
        _check(saved.run, folder)
        if problem := how.refusal():
            raise SpecError(problem)
        Balance(None).keep(saved.run[MEMORIES])
        ready.append(job.data.reach(saved.run[POSITION]))

    saved = pipe.load(how, target, folder, also=also, check=check, seed=lambda saved: saved.run[SEED])
    ready[0]()
    job._shards = target if isinstance(target, ShardedArrangement) else None
    job._balance.keep(saved.run[MEMORIES])
    job._begin_balancing()


def _renew(job: Job) -> None:
    """Make all communicators anew: those from before a failure are of no use. Collective."""
    limit_s, pipe = job._groups.timeout_s, job.pipeline
    met("loading after a failure", lambda: "", limit_s)

    def ended() -> str:
        with at_work("what was being prepared"):
            job._groups.idle()
        return ""

    met("ending what was being prepared", ended, limit_s)  # its thread makes groups, in an order with these
    job._preparing = None
    job._groups.close()
    job._groups = Groups(limit_s)
    lost = pipe.failures.error

    def entered() -> str:
        pipe.groups.enter(None)
        return ""

    try:
        met("making the world's process groups", entered, limit_s)
        job._groups.together(job._wanted(job.layout))
    except BaseException:
        pipe.failures.error = lost  # the next load makes them
        raise
    pipe.groups.sit(job._seats(job.layout))


def _check(run: Mapping[str, Any], folder: str | Path) -> None:
    """Raise `SpecError` unless a checkpoint says how far a job was."""
    for name, least in ((POSITION, 0), (SEED, -1 << 63)):
        value = run.get(name)
        if type(value) is not int or not least <= value < 1 << 63:
            raise SpecError(f"{folder}: run.{name}: expected a whole number, as job.save writes it, got {value!r:.60}")
    if not isinstance(run.get(MEMORIES), dict):
        raise SpecError(f"{folder}: run.{MEMORIES}: expected what balancing remembers, got {run.get(MEMORIES)!r:.60}")
