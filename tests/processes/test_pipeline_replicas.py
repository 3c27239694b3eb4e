"""Replicas of a pipeline on real processes: what they train is what one process trains."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import pipeline_balance
from pipeline_balance.control.controller import ControllerConfig, MoveCost
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError, StageFailed, TransitionError
from prophet.state.transition import empty
from tests.helpers.launch import run_gloo
from tests.helpers.pipeline_replicas import (
    PARTS,
    TOLERANCE,
    UNITS,
    Outcome,
    batch,
    compare_with_one_process,
    counted,
    largest_difference,
    layers,
    loss_fn,
    make_optimizer,
    maps,
    part_of,
    replicated,
    scaled,
    scaled_one_process,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Outcome], str]:
    folder = str(tmp_path_factory.mktemp("replicas") / "checkpoint")
    return run_gloo(replicated, 4, 2, 0, 10, folder, {}), folder


def test_two_replicas_of_two_stages_train_as_one_process(saved: tuple[list[Outcome], str]) -> None:
    compare_with_one_process(saved[0], 0, 10)


@pytest.mark.parametrize(("ranks", "replicas"), [pytest.param(2, 1, marks=pytest.mark.slow), (2, 2), (4, 4)])
def test_another_grid_goes_on_where_this_one_ended(saved: tuple[list[Outcome], str], ranks: int, replicas: int) -> None:
    compare_with_one_process(run_gloo(replicated, ranks, replicas, 10, 14, saved[1], {}), 10, 14)


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
def test_four_replicas_of_two_stages_train_as_one_process(split: bool) -> None:
    options: dict[str, Any] = {"split_backward": split}
    compare_with_one_process(run_gloo(replicated, 8, 4, 0, 50, "", options, timeout_s=280.0), 0, 50)


def test_an_overflow_on_one_rank_skips_the_update_on_all() -> None:
    losses, scales = scaled_one_process(8)
    assert sum(after < before for before, after in pairwise(scales)) == 2
    for got, found in run_gloo(scaled, 4, 2, 8):
        assert found == scales
        assert largest_difference(got, losses) < TOLERANCE


def _mistakes(rank: int, size: int) -> list[str]:
    """What a pipeline says on this rank to mistakes that must not train wrongly, and that it goes on afterwards."""
    told: list[str] = []

    def refused(error: type[Exception], call: Callable[[], object]) -> None:
        with pytest.raises(error) as caught:
            call()
        told.append(str(caught.value))

    def make(model: nn.Module, replicas: int = 2) -> ElasticPipeline:
        return ElasticPipeline.from_modules(
            model,
            loss_fn,
            StageMap((0, 2, UNITS), (0, 1)),
            make_optimizer=make_optimizer,
            microbatches=PARTS // 2,
            replicas=replicas,
            counted=counted,
            timeout_s=60.0,
        )

    wrapped = layers()
    wrapped[2] = nn.parallel.DistributedDataParallel(wrapped[2])
    refused(SpecError, lambda: make(wrapped))
    sharded = layers()
    fully_shard(sharded[3].up)
    refused(SpecError, lambda: make(sharded))
    refused(SpecError, lambda: make(layers(), replicas=3))

    pipe = make(layers())
    x, y = (part_of(t, pipe.replica, 2) for t in batch(0, 0))
    plain = torch.amp.GradScaler("cpu") if rank == 1 else pipe.scaler()
    refused(SpecError, lambda: pipe.step(x, y, scaler=plain))
    refused(SpecError, lambda: pipe.step(x[:3] if rank == 3 else x, y[:3] if rank == 3 else y))
    before = pipe.step(x, y)
    if rank == 2:
        pipe.mover.allocate = _no_memory
    refused(TransitionError, lambda: pipe.rebuild(maps(2, 2)))
    pipe.mover.allocate = empty
    refused(SpecError, lambda: pipe.rebuild(StageMap((0, 3, UNITS + (rank == 1)), (0, 1))))
    for error, changed in ((SpecError, (3,)), (TransitionError, (1, 3))):
        with torch.no_grad():
            kept = pipe.module[-1].weight.clone()
            pipe.module[-1].weight += float(rank in changed)
        refused(error, lambda: pipe.rebuild(maps(2, 2)))
        with torch.no_grad():
            pipe.module[-1].weight.copy_(kept)
    told.append(f"{before} {pipe.step(x, y)}")
    return told


def _no_memory(*_: object) -> torch.Tensor:
    raise MemoryError("none left")


def test_mistakes_are_named_on_all_ranks_before_anything_changes() -> None:
    results = run_gloo(_mistakes, 4)
    for ddp, fsdp, grid, scaler, batch_, memory, map_, apart, tie, losses in results:
        assert "layer 2 is wrapped in DistributedDataParallel" in ddp
        assert "replicas=R" in ddp
        assert "layer 3 (up) is wrapped in FSDPModule" in fsdp
        assert "4 processes cannot be divided into 3 replicas" in grid
        assert "write scaler = pipe.scaler(...)" in scaler
        assert scaler.startswith("rank 1: ")
        assert "ranks [3] have inputs of other shapes than rank 2" in batch_
        assert "rank 2" in memory
        assert "none left" in memory or "could not prepare" in memory
        whole = "the state from before the move is whole"
        assert map_ == f"rank 1: the stage map is of {UNITS + 1} layers, the model has {UNITS}; {whole}"
        assert "replicas have come apart: '0.weight' differs on rank(s) [3] from rank 1" in apart
        assert "tied parameter '0.weight' has other weights on rank(s) [1, 3] than on rank 0" in tie
        assert losses == results[0][-1]


class _Slow(nn.Module):
    """A layer that takes at least some seconds; sleeping does not need a core."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(4, 4), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.tanh(self.linear(x))


def _follow(rank: int, size: int, ahead: bool, zero: int) -> tuple[list[tuple[int, ...]], list[float], list[float]]:
    """Layer 0 is slow in the first replica, layer 1 in the second."""
    slow = rank // 2
    pipe = ElasticPipeline.from_modules(
        [_Slow(30e-3 if i == slow else 1e-3) for i in range(6)],
        nn.functional.mse_loss,
        make_optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
        microbatches=2,
        replicas=2,
        zero=zero,
        timeout_s=60.0,
    )
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(pipe.replica))
    pipe.step(x, x)
    pipe.step(x, x)
    forward_s = [cost.forward_s for cost in pipe.measure()]
    config = ControllerConfig(
        every_steps=2, measure_steps=1, min_gain=0.1, move_cost=MoveCost(fixed_s=0.0), prepare_in_backward=ahead
    )
    balanced = pipeline_balance.attach(pipe, config=config)
    maps, losses = [], []
    for _ in range(8):
        losses.append(balanced.step(x, x))
        maps.append(pipe.stage_map.boundaries)
    return maps, losses, forward_s


@pytest.mark.parametrize(("ahead", "zero"), [(False, 0), pytest.param(True, 0, marks=pytest.mark.slow), (True, 1)])
def test_all_replicas_move_together_by_the_slowest_times(ahead: bool, zero: int) -> None:
    results = run_gloo(_follow, 4, ahead, zero)
    maps, losses, forward_s = results[0]
    assert all(r == results[0] for r in results)
    assert min(forward_s[:2]) >= 30e-3
    assert maps[0] == (0, 3, 6)
    assert maps[-1][1] < 3
    assert losses[-1] < losses[0]


class _Failing(nn.Module):
    """A layer that raises, or kills its process, in some update; `when` is counted down by training passes."""

    def __init__(self, how: str, when: int) -> None:
        super().__init__()
        self.linear, self.how, self.left = nn.Linear(4, 4), how, when

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("no such number")
        return torch.tanh(self.linear(x))


def _fail(rank: int, size: int, how: str) -> str:
    """Process 3, which is the last stage of the second replica, fails in its second update."""
    pipe = ElasticPipeline.from_modules(
        [nn.Linear(4, 4), nn.Linear(4, 4), _Failing(how, 4 if rank == 3 else -1), nn.Linear(4, 4)],
        nn.functional.mse_loss,
        make_optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        microbatches=2,
        replicas=2,
        timeout_s=60.0,
    )
    x = torch.ones(4, 4)
    pipe.step(x, x)
    with pytest.raises(StageFailed) as caught:
        pipe.step(x, x)
    return str(caught.value)


@pytest.mark.parametrize(("how", "cause"), [("raises", "ArithmeticError: no such number"), ("killed", "process")])
def test_a_failure_in_one_replica_is_named_in_all(how: str, cause: str) -> None:
    for rank, said in enumerate(run_gloo(_fail, 4, how, silent=(3,) if how == "killed" else ())):
        if (rank, how) != (3, "killed"):
            assert "rank 3 (stage 1) failed in" in said
            assert cause in said
