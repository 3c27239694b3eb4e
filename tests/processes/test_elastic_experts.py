"""A job shares experts over ep ranks, and moves them to other homes when ep changes: exactly, with their moments."""

from __future__ import annotations

import pytest
import torch

from pipeline_balance.elastic.parallelism import Parallelism
from tests.helpers.elastic_experts import plain_losses, start, whole
from tests.helpers.elastic_jobs import check_held, same, train
from tests.helpers.launch import run_gloo


def _tour(rank: int, size: int, layouts: tuple[str, ...], every: int) -> list[float]:
    job = start(layouts[0])
    optimizer, parameters = job.optimizer, list(job.model.parameters())
    losses = train(job, every)
    check_held(job)
    for text in layouts[1:]:
        before = whole(job)
        job.switch(Parallelism.parse(text))
        assert same(whole(job), before)
        check_held(job)
        assert job.optimizer is optimizer
        assert all(p is q for p, q in zip(parameters, job.model.parameters(), strict=True))
        losses += train(job, every)
    assert {float(s["step"]) for s in optimizer.state.values()} <= {float(every * len(layouts))}
    job.close()
    return losses


@pytest.mark.parametrize(
    ("layouts", "every"),
    [
        (("dp2,ep2", "dp4,ep4", "dp4", "dp4,ep2"), 2),
    ],
)
def test_a_job_that_changes_ep_loses_nothing(layouts: tuple[str, ...], every: int) -> None:
    """`every` steps in each layout; the losses are those of one process that has all experts."""
    results = run_gloo(_tour, 4, layouts, every)
    expected = plain_losses(every * len(layouts))
    for losses in results:
        assert losses == pytest.approx(expected, abs=1e-9)
