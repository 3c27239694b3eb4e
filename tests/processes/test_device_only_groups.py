"""A process group that knows a device alone, as `init_process_group("nccl")` makes it: ranks still agree on the host.

The group is gloo's for "cuda", so it refuses a tensor on the host as NCCL does, and no GPU is needed to see who sends
one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import prophet
from pipeline_balance import elastic
from prophet.ranks.operation import Operation
from prophet.ranks.process_group import collective_for
from tests.helpers import elastic_experts, elastic_jobs, own_loops
from tests.helpers.launch import run_gloo
from tests.helpers.pipeline_replicas import compare_with_one_process, replicated
from tests.helpers.support import RandomPlanner
from tests.helpers.training import compare, expected, train_in_process, varied_cases

EXACT = 1e-9


def _on_a_device_alone(rank: int, size: int, folder: str, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))
    # the tests' own comparisons travel beside
    dist.all_gather_object = functools.partial(dist.all_gather_object, group=dist.new_group(backend="gloo"))
    return body(rank, size, *args)


def _run(body: Callable[..., Any], size: int, folder: Path, *args: Any) -> list[Any]:
    return run_gloo(_on_a_device_alone, size, str(folder), body, args)


def _collectives(rank: int, size: int) -> list[str]:
    part = dist.new_group([1, 2])
    groups = [None, part] if rank else [None]
    said = []
    for group in groups:
        ranks = collective_for(group, timeout_s=20.0)
        every = ranks.all_gather(torch.tensor([rank]), op=Operation("gathering")).reshape(-1).tolist()
        assert every == ranks.gather_at_once(torch.tensor([rank]), op=Operation("agreeing")).reshape(-1).tolist()
        assert ranks.meet(Operation("meeting"), failed=rank == 1) == [every.index(1)]
        said.append(ranks.decide(Operation("deciding"), f"of {every}", ready=rank != 2).against)
    return said


def test_ranks_agree_in_the_world_and_in_a_part_of_it(tmp_path: Path) -> None:
    world, part = "ranks [2] were not ready", "ranks [1] were not ready"
    assert _run(_collectives, 3, tmp_path) == [[world], [world, part], [world, part]]


def _layers(rank: int, size: int, todo: list[Any]) -> Any:
    return [train_in_process(case) for case in todo]


def test_balanced_layers_have_the_gradients_of_the_oracle(tmp_path: Path) -> None:
    todo = varied_cases(2)
    by_rank = _run(_layers, 2, tmp_path, todo)
    for i, case in enumerate(todo):
        compare(expected(case), [results[i] for results in by_rank])


def test_a_pipeline_trains_evaluates_and_moves(tmp_path: Path) -> None:
    """Not saved: torch's own writer talks on the device where a group has nothing else."""
    compare_with_one_process(_run(replicated, 4, tmp_path, 2, 0, 10, "", {}), 0, 10)


def _job(rank: int, size: int) -> list[float]:
    job = elastic_jobs.start("pp2")
    losses = elastic_jobs.train(job, 2)
    job.prepare(elastic.Parallelism.parse("dp2,zero1"))
    losses += elastic_jobs.train(job, 1)
    job.switch(elastic.Parallelism.parse("dp2,zero1"))
    losses += elastic_jobs.train(job, 2)
    job.close()
    return losses


def test_a_job_prepares_and_switches(tmp_path: Path) -> None:
    for losses in _run(_job, 2, tmp_path):
        assert losses == pytest.approx(elastic_jobs.plain_losses(5), abs=EXACT)


def _balanced(rank: int, size: int) -> tuple[list[float], int]:
    config = prophet.EngineConfig(planner=RandomPlanner(5, 0.8), slots_per_rank=4)
    job = elastic_experts.start("dp2,ep2", balance_experts=config)
    losses = elastic_jobs.train(job, 1)
    job.switch(elastic.Parallelism.parse("pp2,dp2,ep2,zero1"))
    losses += elastic_jobs.train(job, 1)
    copies = int(job.engine.last_step.copies.sum()) if job.engine is not None else 1  # type: ignore[union-attr]
    job.close()
    return losses, copies


def test_a_job_balances_its_experts(tmp_path: Path) -> None:
    for losses, copies in _run(_balanced, 4, tmp_path):
        assert losses == pytest.approx(elastic_experts.plain_losses(2), abs=EXACT)
        assert copies > 0


def _own_loop(rank: int, size: int) -> list[float]:
    here, there = (elastic.Parallelism.parse(text) for text in ("dp1", "dp1,order1"))
    model: nn.Module = own_loops.build().to("cpu" if rank == 0 else "meta")
    optimizer = own_loops.momentum(model.parameters())
    losses = [own_loops.train_step(model, optimizer, here, 0)]
    model = elastic.reshard(model, optimizer, here, there, own_loops.build, timeout_s=30.0)
    return [*losses, own_loops.train_step(model, optimizer, there, 1)]


def test_a_model_of_ones_own_goes_to_another_process(tmp_path: Path) -> None:
    for losses in _run(_own_loop, 2, tmp_path):
        assert losses == pytest.approx(own_loops.alone(2, own_loops.momentum), abs=EXACT)
