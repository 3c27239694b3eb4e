"""One rank runs a forward pass that the others never come to: they wait for it elsewhere, and it says so soon."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import prophet
from prophet.errors import CollectiveError, OutOfStep
from tests.helpers.launch import on_processes, process_outcomes

LIMIT_S = 60.0  # of every wait, unless the ranks notice
SOON_S = 10.0  # it takes two to four seconds where nobody else uses the machine


class Net(nn.Module):
    """A layer behind another one, and a buffer, which DDP sends before every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.moe = nn.Linear(4, 4), prophet.MoE(4, 6, 4, timeout_s=LIMIT_S)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.moe(self.first(x)) * self.scale
        return y


def lonely(case: str) -> tuple[str, float]:
    """What the rank that is alone says, and after how many seconds."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prophet.attach(model, optimizer)
    wrapped = DistributedDataParallel(model)
    x, rank = torch.ones(3, 4), dist.get_rank()

    def step() -> None:
        wrapped(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    if rank == 0:
        started = time.monotonic()
        with pytest.raises(OutOfStep) as caught:
            model.train(case == "one batch more")(x)
        took = time.monotonic() - started
        if case == "the others train":
            with pytest.raises(CollectiveError, match="an earlier operation failed"):
                wrapped(x)  # it sends what the other waits for
        else:
            dist.barrier()
        return str(caught.value), took
    if case == "the others train":
        with pytest.raises(OutOfStep, match=r"rank\(s\) \[0\] at MoE layer 0 of forward pass 2 \(evaluation\)"):
            step()
    else:
        dist.barrier()
    return "", 0.0


@pytest.mark.parametrize(
    "case", [pytest.param("the others wait", marks=pytest.mark.slow), "the others train", "one batch more"]
)
def test_a_forward_pass_on_one_rank_is_named_soon(case: str) -> None:
    said, took = on_processes(2, lonely, case, timeout_s=LIMIT_S)[0]
    assert took < SOON_S
    where = "DistributedDataParallel" if case == "the others train" else "torch.distributed.barrier"
    assert f"rank(s) [1] wait for rank 0 in {where} (test_alone.py, line " in said
    assert "call evaluate(model) on every rank" in said
    assert "as many batches" in said


def joined() -> None:
    """One rank has a batch more, and DDP's `join` is meant to help."""
    model = Net()
    prophet.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped: Any = DistributedDataParallel(model)
    with wrapped.join():
        for _ in range(3 if dist.get_rank() else 2):
            wrapped(torch.ones(3, 4)).sum().backward()


def test_joining_does_not_help_and_says_so() -> None:
    more = process_outcomes(2, joined, timeout_s=LIMIT_S, grace_s=1.0)[1]
    assert more.seconds < 2 * SOON_S
    assert more.error is not None
    assert "OutOfStep: rank 1: " in more.error
    assert "rank(s) [0] wait for rank 1 in join() (test_alone.py, line " in more.error


def patient() -> bool:
    """Rank 0 is early; the others wait for one another, in calls that it has no part in."""
    layer, rank = prophet.MoE(4, 6, 6, timeout_s=LIMIT_S), dist.get_rank()
    pairs = [dist.new_group([1, 2]) for _ in range(2)]
    layer(torch.ones(3, 4))
    if rank == 1:
        send = threading.Timer(4.5, dist.send, (torch.ones(1), 2), {"group": pairs[0]})
        send.start()
        dist.barrier(pairs[1])
        send.join()
    if rank == 2:
        dist.recv(torch.ones(1), 1, group=pairs[0])
        dist.barrier(pairs[1])
    return bool(layer(torch.ones(3, 4)).isfinite().all())


def test_ranks_that_are_only_late_are_waited_for() -> None:
    assert on_processes(3, patient, timeout_s=LIMIT_S) == [True] * 3
