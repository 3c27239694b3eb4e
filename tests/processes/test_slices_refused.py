"""What slices cannot do is said on all ranks before a step; a rank that fails or is lost ends the step everywhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

import prophet
from pipeline_balance.pipeline.trainer import ElasticPipeline
from pipeline_balance.slices.options import SliceOptions
from pipeline_balance.slices.parts import Sliced
from pipeline_balance.spec import StageMap
from prophet.errors import SpecError, StageFailed
from prophet.experts.gate import GateConfig
from prophet.ranks.threads import ThreadWorld
from tests.helpers import sliced_layers as own
from tests.helpers.launch import process_outcomes, run_gloo
from tests.helpers.releases import after_2_11


def pipe_of(
    options: SliceOptions, *more: nn.Module, stage_map: StageMap | None = None, **others: Any
) -> ElasticPipeline:
    embed, *blocks, head = own.layers()
    given: dict[str, Any] = {"make_optimizer": own.adam, "microbatches": own.PARTS, "timeout_s": 20.0, **others}
    return ElasticPipeline.from_modules(
        nn.Sequential(embed, *blocks, *more, head), own.loss_fn, stage_map, counted=own.counted, slices=options, **given
    )


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except SpecError as error:
        return str(error)
    return "nothing"


def _refused(rank: int, size: int) -> list[str]:
    limited = prophet.MoE(
        own.DIM, 8, 4, 2, gate=GateConfig(capacity_factor=1.0), group=ThreadWorld(1).collective(0), impl="naive"
    ).double()
    inputs, labels = own.batch(0, 0)
    short = {n: t[:, :3] for n, t in inputs.items()}
    recurrent = pipe_of(SliceOptions(4), own.Recurrent())  # the last stage's
    uneven = SliceOptions(4, balance="uneven", crossover_tokens=5)
    pipe = pipe_of(uneven, stage_map=StageMap((0, 2, 4), (0, 1)))
    twice = pipe_of(SliceOptions(3, 2), nn.Identity(), stage_map=StageMap((0, 2, 5), (0, 0)))  # p = 1

    def parallel() -> None:
        spread = torch.zeros(2, 4 * size)
        with context_parallel(init_device_mesh("cpu", (size,)), buffers=[spread], buffer_seq_dims=[1]):
            pipe.step(inputs, labels)

    said = [
        _error(lambda: pipe_of(SliceOptions(4, balance=("none", "uneven")[rank]))),  # type: ignore[arg-type]
        _error(lambda: pipe_of(SliceOptions(4, balance="uneven", crossover_tokens=5 + rank))),
        _error(lambda: pipe_of(SliceOptions(4), limited)),
        _error(lambda: pipe_of(SliceOptions(4, balance="uneven")).step(inputs, labels)),
        _error(lambda: recurrent.step(inputs, labels)),
        _error(lambda: pipe.step(short, labels[:, :3])),
        _error(lambda: pipe.step({n: t[:, rank:] for n, t in inputs.items()}, labels[:, rank:])),
        _error(parallel),
        _error(lambda: twice.rebuild(StageMap((0, 1, 2, 3, 5), (0, 1, 0, 1)))),
        _error(lambda: pipe_of(4)),  # type: ignore[arg-type]
    ]
    first = [pipe.step(inputs, labels), twice.step(inputs, labels)]
    assert all(0 < x < 10 for x in first)  # nothing was lost
    assert isinstance(pipe.model, Sliced)
    assert not len(pipe.model.store)
    return said


@after_2_11
def test_each_is_one_error_on_all_ranks() -> None:
    expected = [
        "ranks [1] cut microbatches by SliceOptions(slices=4",
        "crossover_tokens=6",
        "has a gate with capacity_factor",
        "needs crossover_tokens for layers of one's own",
        "layer 3 (Recurrent) computes other outputs for two slices in turn",
        "sequences of 3 tokens cannot be cut into 4 slices",
        "ranks [1]",
        "context parallelism",
        "take 2 or 4 instead of 3",
        "slices: expected pipeline_balance.slices.SliceOptions(...), got 4",
    ]
    for said in run_gloo(_refused, 2, timeout_s=120.0):
        for text, part in zip(said, expected, strict=True):
            assert part in text, text


class Fails(nn.Module):
    """Fails, or ends its process, in the third slice's forward or in the second slice's backward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.armed, self.slices = how, False, 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.armed or isinstance(x, torch._subclasses.FakeTensor):
            return x
        self.slices += 1
        if self.how == "backward" and self.slices == 2:
            x = x * 1.0
            x.register_hook(self.fail)
        elif self.how != "backward" and self.slices == 3:
            self.fail(x)
        return x

    def fail(self, x: Tensor) -> None:
        if self.how == "dies":
            os._exit(3)
        raise RuntimeError("asked to fail")


def _failing(rank: int, size: int, how: str, at: int) -> tuple[int, str, float]:
    """Layer `at` fails: chunks that are alive afterwards, what was said, seconds until then."""
    layer = Fails(how)
    pipe = pipe_of(SliceOptions(4, order="aligned"), layer, nn.Identity(), stage_map=StageMap((0, at, 6), (0, 1)))
    pipe.step(*own.batch(0, 0))
    layer.armed = True
    began = time.monotonic()
    with pytest.raises(Exception, match=r".") as caught:
        pipe.step(*own.batch(1, 0))
    if how != "dies":
        assert isinstance(caught.value, StageFailed)
    assert isinstance(pipe.model, Sliced)
    return len(pipe.model.store), str(caught.value), time.monotonic() - began


@pytest.mark.parametrize(("how", "at"), [("backward", 4), pytest.param("forward", 2, marks=pytest.mark.slow)])
def test_a_failing_layer_ends_the_step_everywhere(how: str, at: int) -> None:
    for alive, said, seconds in run_gloo(_failing, 2, how, at):
        assert alive == 0
        assert "asked to fail" in said
        assert seconds < 20.0


def _lost() -> tuple[int, str, float]:
    return _failing(dist.get_rank(), dist.get_world_size(), "dies", 4)


def test_a_lost_rank_ends_the_step_everywhere() -> None:
    lost, left = process_outcomes(2, _lost, timeout_s=90.0, grace_s=60.0)
    assert lost.exit_code == 3
    assert left.well
    alive, _, seconds = left.result
    assert alive == 0
    assert seconds < 40.0
