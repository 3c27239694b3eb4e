"""What makes the host wait for its device: the exchange of counts in every layer, and nothing else.

On a device that is none (see `tests.helpers.pretend_device`), with the kernels in Triton's interpreter, where that was
asked for by TRITON_INTERPRET=1: `tests/kernels/test_interpreter.py` does. Results are compared with the oracle's all
the same, so it also shows that an engine's tensors are on the device that they should be on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import prophet
from prophet.engine.parallel import clip_grad_norm_, update_biases
from prophet.errors import OutOfStep
from prophet.kernels.choice import triton_available
from prophet.ranks.collective import Collective
from prophet.ranks.messages import gather_numbers, share
from prophet.ranks.operation import Operation
from prophet.ranks.threads import ThreadWorld
from tests.helpers.paths import INTERPRETED, one_kernel_at_a_time
from tests.helpers.pretend_device import NAME, SUPPORTED, kernels_in_the_interpreter, on_pretended_device, values
from tests.helpers.support import FixedPlanner, everywhere, on_threads
from tests.helpers.training import Case, Run, Step, compare, expected

if not (SUPPORTED and INTERPRETED and triton_available()):
    pytest.skip(
        "needs Triton in its interpreter, and a torch that knows devices made in Python", allow_module_level=True
    )

CASE = Case(shapes=((2, 3), (4,)), steps=3, seed=7, impl="triton", device=NAME)
COUNTS = "return x.cpu()"


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with kernels_in_the_interpreter(), one_kernel_at_a_time():
        yield


def train(case: Case, group: Collective, **options: Any) -> tuple[list[Step], list[list[str]]]:
    """A rank's steps, and what the host waited for in each of them."""
    planner = FixedPlanner(everywhere(case.num_experts, case.ranks))
    steps, waits = [], []
    with on_pretended_device() as watch:
        run = Run(case, group, planner, **{"slots_per_rank": 8, "check_every": 100, **options})
        for s in range(case.steps):
            run.zero_grad()
            before = len(watch.waits)
            for microbatch in range(case.microbatches):
                run.backward(s, microbatch)
            norm = run.engine.clip_grad_norm_(run.model.parameters(), 1e9)
            passes = watch.waits[before:]
            steps.append(run.averaged())
            before = len(watch.waits)
            run.optimizer.step()
            waits.append(passes + watch.waits[before:])
            assert values(norm).isfinite()
        run.close()
    return steps, waits


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(replace(CASE, gate={"aux_loss": "gshard", "z_loss_weight": 0.1}), id="gshard"),
        pytest.param(
            replace(
                CASE,
                refetch=True,
                microbatches=2,
                schedule="blocking",
                transfers="two-phase",
                gate={"aux_loss": "switch", "capacity_factor": 1.0},
            ),
            id="refetch, two-phase",
        ),
        pytest.param(
            replace(CASE, favourites=(0,), activation="swiglu", bias=False, gate={"score": "sigmoid"}), id="bias"
        ),
    ],
)
def test_a_step_waits_once_per_layer_and_pass(case: Case) -> None:
    by_rank = on_threads(case.ranks, lambda group: train(case, group))
    compare(expected(case), [steps for steps, _ in by_rank], atol=1e-5)
    for _, waits in by_rank:
        assert len(waits[0]) > len(waits[-1])  # the first two steps compare splits and parameters, as do a few later on
        assert all(COUNTS in wait for wait in waits[-1]), waits[-1]
        assert len(waits[-1]) == case.blocks * case.microbatches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_scales_without_a_look_at_the_norm(dtype: torch.dtype) -> None:
    grads = [torch.tensor([3.0, -1.0], dtype=dtype), torch.full((2, 2), 0.5, dtype=dtype)]
    norm = sum(float(g.float().square().sum()) for g in grads) ** 0.5
    with on_pretended_device() as watch:
        parameters = [torch.nn.Parameter(torch.zeros_like(g).to(NAME)) for g in grads]
        for p, g in zip(parameters, grads, strict=True):
            p.grad = g.to(NAME)
        watch.waits.clear()
        found = clip_grad_norm_(parameters, 0.1, ThreadWorld(1).collective(0), torch.device(NAME))
        assert watch.waits == []
        assert values(found).item() == pytest.approx(norm)
        for p, g in zip(parameters, grads, strict=True):
            assert p.grad is not None
            wanted = (g.float() * (0.1 / (norm + 1e-6))).to(dtype)
            torch.testing.assert_close(values(p.grad), wanted, rtol=1e-6, atol=0)


def test_biases_of_several_replicas_are_updated_without_waiting() -> None:
    def rank(group: Collective) -> list[str]:
        with on_pretended_device() as watch:
            alone = ThreadWorld(1).collective(0)
            layer = prophet.MoE(4, 4, 2, 1, gate=prophet.GateConfig(bias_update_rate=0.5), group=alone)
            layer.to(NAME).replicas = group
            watch.waits.clear()
            update_biases([layer], [np.array([3, 1 - group.rank])])
            assert layer.gate.bias is not None
            assert values(layer.gate.bias).tolist() == [-0.5, 0.5]
            return watch.waits

    assert on_threads(2, rank) == [[], []]


def test_what_a_rank_says_in_another_operation_is_no_norm() -> None:
    """The rank that asks for the norm does not look, and so cannot raise: it gets NaN. The other one raises."""

    def rank(group: Collective) -> list[list[float]]:
        with on_pretended_device() as watch:
            if group.rank == 1:
                load = torch.zeros(1, dtype=torch.int64).to(NAME)
                with pytest.raises(OutOfStep, match=r"rank\(s\) \[0\] at gradient norm"):
                    gather_numbers(group, [1], [load], op=Operation("exchange of counts", 0))
                return []
            mine = torch.ones(2, dtype=torch.float64).to(NAME)
            watch.waits.clear()
            found = share(group, mine, op=Operation("gradient norm"))
            assert watch.waits == []
            table: list[list[float]] = values(found).tolist()
            return table

    ours, theirs = on_threads(2, rank)[0]
    assert ours == [1.0, 1.0]
    assert all(math.isnan(value) for value in theirs)


def waited(body: Any) -> int:
    with on_pretended_device() as watch:
        body(torch.arange(4.0).to(NAME, non_blocking=True))
        return len(watch.waits)


@pytest.mark.parametrize(
    ("body", "waits"),
    [
        pytest.param(lambda x: x.sum().item(), 1, id="item"),
        pytest.param(lambda x: bool(x.sum() > 1), 1, id="condition"),
        pytest.param(lambda x: x.cpu().tolist(), 1, id="list"),
        pytest.param(lambda x: x.to("cpu", non_blocking=True), 1, id="to the host"),
        pytest.param(lambda x: x + torch.ones(4).to(x.device), 1, id="blocking copy"),
        pytest.param(lambda x: torch.tensor([1.0], device=x.device), 1, id="made from values"),
        pytest.param(lambda x: x.copy_(torch.ones(4)), 1, id="copy_"),
        pytest.param(lambda x: x[x > 1], 1, id="mask"),
        pytest.param(lambda x: x.nonzero(), 1, id="nonzero"),
        pytest.param(lambda x: x.long().bincount(), 1, id="bincount"),
        pytest.param(lambda x: x.repeat_interleave(x.long()), 1, id="repeat"),
        pytest.param(lambda x: x.repeat_interleave(x.long(), output_size=6), 0, id="repeat to a known size"),
        pytest.param(lambda x: x[x.long()].cumsum(0).argsort().to(torch.int8).view(2, 2), 0, id="nothing"),
        pytest.param(lambda x: x.add_(torch.ones(4).to(x.device, non_blocking=True)), 0, id="copy that runs on"),
        pytest.param(lambda x: x * torch.tensor(2.0), 0, id="scalar"),
        pytest.param(lambda x: torch.zeros(3, device=x.device).fill_(1), 0, id="made there"),
    ],
)
def test_what_is_taken_for_a_wait(body: Any, waits: int) -> None:
    assert waited(body) == waits


def test_tensors_of_host_and_device_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        waited(lambda x: x + torch.ones(4))
