"""Means over replicas whose devices run behind their hosts."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from pipeline_balance.pipeline.run.replicas import ReplicaMeans
from prophet.ranks.collective import Pending
from prophet.ranks.gradient_means import average_gradients_
from prophet.ranks.operation import Operation
from tests.helpers.device_ranks import DeviceCollective, DeviceDeadlock, DeviceWorld
from tests.helpers.late_operators import Late
from tests.helpers.pretend_device import NAME, skip_beside_others

skip_beside_others()


@pytest.mark.parametrize("own", [True, False])
def test_a_mean_has_a_stream_of_its_own_on_a_device(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On replica 0 the mean comes before training's next collective, on replica 1 after it."""
    if not own:
        monkeypatch.setattr(Late, "new_stream", lambda self: None)
    launched = [threading.Event(), threading.Event()]

    class Later(DeviceCollective):
        def all_to_all(self, *given: Any, **named: Any) -> Pending:
            assert self.rank == 0 or launched[1].wait(20.0)
            pending = super().all_to_all(*given, **named)
            inner = pending.wait

            def wait() -> torch.Tensor:
                # the mean is in the thread's stream now, and what training launches comes after it
                found = inner()
                launched[self.rank].set()
                return found

            pending.wait = wait  # type: ignore[method-assign]
            return pending

    def run(world: DeviceCollective) -> list[list[float]]:
        means = ReplicaMeans(Later(world._world, world.rank, "column", [0, 1]))
        p = nn.Parameter(torch.zeros(3, device=NAME))
        p.grad = torch.full((3,), 1.0 + world.rank, device=NAME) * 2
        mine = torch.tensor([world.rank], device=NAME)
        means.start([p], 0)
        assert world.rank == 1 or launched[0].wait(20.0)
        every = world.all_gather(mine, op=Operation("training"))
        launched[1].set()
        means.finish()
        found = [p.grad.tolist(), every.flatten().tolist()]
        means.close()
        return found

    ranks = DeviceWorld(2, timeout_s=20.0)
    if own:
        assert ranks.run(run) == [[[3.0] * 3, [0, 1]]] * 2
    else:
        with pytest.raises(DeviceDeadlock, match="default stream"):
            ranks.run(run)


@pytest.mark.parametrize("one_queue", [False, True])
def test_buckets_follow_each_other_without_the_host(one_queue: bool) -> None:
    """The host reads what comes before the first bucket, and nothing else."""

    def run(world: DeviceCollective) -> list[list[float] | None]:
        parameters = [nn.Parameter(torch.zeros(5, device=NAME)) for _ in range(3)]
        for place, p in enumerate(parameters[:2]):
            if place <= world.rank:
                p.grad = torch.full((5,), 1.5 + 1.5 * world.rank, device=NAME)
        average_gradients_(parameters, world, op=Operation("mean"), bucket_bytes=24)
        return [None if p.grad is None else p.grad.tolist() for p in parameters]

    ranks = DeviceWorld(3, one_queue=one_queue, timeout_s=20.0)
    assert ranks.run(run) == [[[3.0] * 5, [2.5] * 5, None]] * 3
    assert [len(waits) for waits in ranks.waits.values()] == [1 + 2] * 3, "beside the two gradients that are read above"
