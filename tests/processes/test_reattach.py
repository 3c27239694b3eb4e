"""One process attaches, closes and attaches again: every attachment works, and no wait is without a limit."""

from __future__ import annotations

import torch

import prophet
from prophet.ranks.process_group import collective_for
from tests.helpers.launch import on_processes
from tests.helpers.support import FixedPlanner, TinyModel, everywhere, next_id_loss


def attach_again_and_again() -> list[float]:
    group = collective_for(None, timeout_s=20.0)
    model = TinyModel(seed=1, group=group).double()
    ids = torch.arange(12).view(2, 6) % 11
    found = []
    for timeout_s in (None, 15.0, None, 15.0):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = prophet.EngineConfig(planner=FixedPlanner(everywhere(8, 2)), slots_per_rank=8, timeout_s=timeout_s)
        engine = prophet.attach(model, optimizer, config=config)
        for _ in range(2):
            optimizer.zero_grad()
            next_id_loss(model(ids), ids, 1.0).backward()
            optimizer.step()
        found.append(engine.collective.timeout_s)
        assert engine.last_step is not None
        assert engine.last_step.copies.sum() == 2 * 8
        engine.close()
    return found


def test_attach_close_attach_with_other_limits() -> None:
    assert on_processes(2, attach_again_and_again) == [[20.0, 15.0, 20.0, 15.0]] * 2
