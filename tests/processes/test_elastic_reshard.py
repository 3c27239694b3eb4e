"""Loops of one's own change their layout as one process trains, and keep every bit of their state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipeline_balance import elastic
from tests.helpers.launch import run_gloo
from tests.helpers.own_loops import Net, adamw, alone, build, build_tied, momentum, train_step, whole

TOUR = ("dp4", "dp4,zero3", "dp2,tp2,zero2", "tp4", "dp2,zero2,order3:1", "dp4")
EACH = 4


def _tour(
    rank: int, size: int, make: Callable[[Any], torch.optim.Optimizer], made: Callable[[], Net], tour: tuple[str, ...]
) -> list[float]:
    layouts = [elastic.Parallelism.parse(text) for text in tour]
    model: nn.Module = nn.parallel.DistributedDataParallel(made())
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    losses: list[float] = []
    for before, layout in zip([layouts[0], *layouts], layouts, strict=False):
        if before != layout:
            seen = whole(model, optimizer)
            model = elastic.reshard(model, optimizer, before, layout, made, timeout_s=60.0)
            now = whole(model, optimizer)
            assert seen.keys() == now.keys()
            assert not [n for n in seen if not torch.equal(seen[n], now[n])], str(layout)
        for _ in range(EACH):
            losses.append(train_step(model, optimizer, layout, len(losses)))
            schedule.step()
    return losses


@pytest.mark.parametrize(
    ("make", "made", "tour"),
    [(adamw, build, TOUR), (momentum, build_tied, ("dp4", "dp2,tp2,zero3", "dp4", "dp4,zero2", "dp1"))],
)
def test_a_loop_trains_on_as_one_process(
    make: Callable[[Any], torch.optim.Optimizer], made: Callable[[], Net], tour: tuple[str, ...]
) -> None:
    expected = alone(EACH * len(tour), make, made)
    for losses in run_gloo(_tour, 4, make, made, tour, timeout_s=100.0):
        assert losses == pytest.approx(expected, abs=1e-9)
