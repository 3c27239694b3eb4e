"""Moves that go wrong in a running pipeline: a named error, and what was there before is whole."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline_balance.control.controller import Controller, ControllerConfig
from pipeline_balance.pipeline.move.state import collect
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.spec import PartitionError, RankLimits, StageMap
from prophet.errors import StageFailed, TransitionError
from prophet.state.transition import empty
from tests.helpers.launch import run_gloo
from tests.helpers.pipeline_model import LAYERS, TOLERANCE, batch, pipeline, plain_losses

THREE = StageMap.contiguous((0, 3, 5, LAYERS))


def _state(run: ElasticPipeline) -> dict[str, Tensor]:
    held = collect(run.owned, run.optimizers, run.stage_map.layers_on(run.rank))
    return {name: tensor.clone() for name, tensor in held.tensors.items()}


def _same(run: ElasticPipeline, before: dict[str, Tensor]) -> bool:
    now = _state(run)
    return set(now) == set(before) and all(torch.equal(now[name], tensor) for name, tensor in before.items())


class _DiesInExchange:
    """A collective whose process is gone when state begins to travel."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def exchange(self, *_: object, **__: object) -> object:
        os._exit(1)


def _lose_one(rank: int, size: int) -> dict[str, Any]:
    run = pipeline(THREE)
    for step in range(2):
        run.step(*batch(step))
    before = _state(run)
    if rank == size - 1:
        run.groups.collective = _DiesInExchange(run.collective)  # type: ignore[assignment]
    with pytest.raises(StageFailed, match=r"rank 2 \(stage 2\) failed .*: its process has ended") as caught:
        # layers of the lost rank and of the others change places
        run.rebuild(StageMap((0, 3, 5, LAYERS), (2, 0, 1)))
    return {
        "whole": _same(run, before) and run.stage_map == THREE,
        "said": str(caught.value.__cause__),
    }


def test_a_rank_that_dies_during_a_move_leaves_the_others_whole() -> None:
    answers = run_gloo(_lose_one, 3, silent=frozenset({2}))
    for answer in answers[:2]:
        assert answer["whole"]
        assert "of a transition failed" in answer["said"]
        assert "the state from before the move is whole" in answer["said"]


def _no_memory(run: ElasticPipeline, calls: int) -> None:
    left = [calls]

    def allocate(*args: Any) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("none left")
        return empty(*args)

    run.mover.allocate = allocate


def _allocation_fails(rank: int, size: int) -> dict[str, Any]:
    run = pipeline(THREE)
    losses = [run.step(*batch(0))]
    whole = []
    for calls in (0, 1, 3):
        before = _state(run)
        if rank == 1:
            _no_memory(run, calls)
        with pytest.raises(TransitionError, match="nothing has moved") as caught:
            run.rebuild(StageMap.contiguous((0, 1, 6, LAYERS)))
        whole.append(_same(run, before) and run.stage_map == THREE)
        assert str(caught.value).startswith("rank 1: no memory for the new state: none left")
        run.mover.allocate = empty
    losses.append(run.step(*batch(1)))
    run.rebuild(StageMap.contiguous((0, 1, 6, LAYERS)))
    return {"losses": [*losses, run.step(*batch(2))], "whole": whole}


def test_an_allocation_that_fails_moves_nothing() -> None:
    answers = run_gloo(_allocation_fails, 3)
    assert all(all(a["whole"]) for a in answers)
    assert answers[0]["losses"] == pytest.approx(plain_losses(3)[0], rel=TOLERANCE)


def _too_large(rank: int, size: int, ahead: bool) -> dict[str, Any]:
    run = pipeline(THREE)
    small = RankLimits.uniform(size, memory_bytes=4_000)
    config = ControllerConfig(every_steps=2, measure_steps=2, prepare_in_backward=ahead)
    balanced = Controller(run, small, config)
    losses = [balanced.step(*batch(0))]
    with pytest.raises(PartitionError, match=r"layer \d+ .*needs at least \d+ bytes, more than any rank has"):
        balanced.step(*batch(1))
    assert run.stage_map == THREE
    # the step itself was done; training goes on without the controller
    return {"losses": [*losses, run.step(*batch(2))]}


@pytest.mark.parametrize("ahead", [False, True])
def test_a_layer_larger_than_any_rank_is_named(ahead: bool) -> None:
    answers = run_gloo(_too_large, 3, ahead)
    expected = plain_losses(3)[0]
    assert answers[0]["losses"] == pytest.approx([expected[0], expected[2]], rel=TOLERANCE)
