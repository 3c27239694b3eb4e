"""A job that switches its layout trains like one that never does, and keeps every bit of its state."""

from __future__ import annotations

import pytest
import torch

from pipeline_balance.elastic.parallelism import Parallelism
from tests.helpers.elastic_jobs import check_held, plain_losses, same, start, train, whole
from tests.helpers.launch import run_gloo

TOUR = ("pp2,dp2", "dp4,zero1", "pp4", "pp2,dp2,zero1", "dp1", "pp3", "dp3,zero1", "pp1,dp2", "pp2,zero1", "pp2,v2,dp2")


def _tour(rank: int, size: int, layouts: tuple[str, ...], every: int) -> list[float]:
    job = start(layouts[0])
    optimizer, parameters = job.optimizer, list(job.model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    losses = train(job, every, schedule)
    for text in layouts[1:]:
        before = whole(job)
        job.prepare(Parallelism.parse(text))
        report = job.switch()
        assert str(job.layout) == str(Parallelism.parse(text))
        assert same(whole(job), before)
        check_held(job)
        assert job.optimizer is optimizer
        assert all(p is q for p, q in zip(parameters, job.model.parameters(), strict=True))
        assert report.seconds > 0
        assert report.peak_bytes >= 0
        losses += train(job, every, schedule)
    assert float(optimizer.state_dict()["param_groups"][0]["lr"]) < 2e-2
    job.close()
    return losses


def test_a_job_that_switches_loses_nothing() -> None:
    every = 2
    results = run_gloo(_tour, 4, TOUR, every)
    expected = plain_losses(every * len(TOUR))
    for losses in results:
        assert losses == pytest.approx(expected, abs=1e-9)
