"""Parameters that change between two forward passes of one step: the replicas must follow."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import prophet
from prophet.ranks.threads import ThreadCollective
from tests.helpers.support import RandomPlanner, TinyModel, on_threads

RANKS = 2


@pytest.mark.parametrize("when", ["replicas are here", "Trans is under way"])
def test_replicas_follow_parameters_that_changed_in_place_on_one_rank_only(when: str) -> None:
    ids = torch.randint(0, 11, (RANKS, 6, 5), generator=torch.Generator().manual_seed(0))

    def body(c: ThreadCollective) -> tuple[float, int]:
        model = TinyModel(seed=1, group=c).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = prophet.attach(model, optimizer, config=prophet.EngineConfig(planner=RandomPlanner(3, density=1.0)))
        mine = ids[c.rank]
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(mine).flatten(0, 1), mine.flatten()).backward()
            optimizer.step()
        if when == "replicas are here":
            model(mine)
        else:
            engine.ensure_step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if c.rank == 0 or "experts" not in name:
                    p.add_(0.1)
        balanced = model(mine)
        step = engine.runtime.step
        assert step is not None
        copies = len(step.blocks[0].placement.replicas())
        model.eval()  # evaluation uses home parameters only
        return float((balanced - model(mine)).detach().abs().max()), copies

    for difference, copies in on_threads(RANKS, body):  # type: ignore[misc]
        assert copies > 0
        assert difference < 1e-12
