"""A job shares experts over ep ranks, and moves them to other homes when ep changes: exactly, with their moments."""

from __future__ import annotations

import pytest

import prophet
from pipeline_balance.elastic.parallelism import Parallelism
from tests.helpers.elastic_experts import plain_losses, start, whole
from tests.helpers.elastic_jobs import check_held, same, train
from tests.helpers.launch import run_gloo
from tests.helpers.support import RandomPlanner


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


TOUR = (
    "dp2,ep2",
    "pp2,dp2,ep2,zero1",
    "dp4,ep2,zero1",
    "dp4,ep4",
    "pp2,dp2",
    "dp4,ep2,order2:0:3:1",
    "dp3,ep3,zero1",
    "pp3",
    "pp2,dp2,ep2",
    "dp4,ep4,zero1",
    "dp1",
)


@pytest.mark.parametrize(
    ("layouts", "every"),
    [
        (TOUR[:6], 1),
        pytest.param(TOUR, 20, marks=pytest.mark.slow),
        *(pytest.param((text,), 30, marks=pytest.mark.slow) for text in ("dp4,ep4", "dp4,ep2", "pp2,dp2,ep2,zero1")),
    ],
)
def test_a_job_that_changes_ep_loses_nothing(layouts: tuple[str, ...], every: int) -> None:
    """`every` steps in each layout; the losses are those of one process that has all experts."""
    results = run_gloo(_tour, 4, layouts, every)
    expected = plain_losses(every * len(layouts))
    for losses in results:
        assert losses == pytest.approx(expected, abs=1e-9)


def _balanced(rank: int, size: int, layouts: tuple[str, ...], every: int) -> tuple[list[float], list[int]]:
    config = prophet.EngineConfig(planner=RandomPlanner(5, 0.8), slots_per_rank=4)
    job = start(layouts[0], balance=config)
    losses = train(job, every)
    observed, copies = every, []
    for text in layouts[1:]:
        before, engine = whole(job), job.engine
        kept = None if engine is None else engine.state_dict()
        job.switch(Parallelism.parse(text))
        assert same(whole(job), before)
        check_held(job)
        if kept is not None and job.engine is not None and str(job.layout).startswith("dp4,ep2"):
            now = job.engine.state_dict()
            assert now["step"] == kept["step"]
        for _ in range(every):
            losses += train(job, 1)
            if job.engine is not None:
                assert job.engine.last_step is not None
                copies.append(int(job.engine.last_step.copies.sum()))
        observed += every
        if job.engine is not None:
            assert job.engine.step <= observed
            assert {x.history.observed for x in job.engine.balanced} == {job.engine.step}
    job.close()
    return losses, copies


@pytest.mark.parametrize(
    ("layouts", "every"),
    [
        (("dp2,ep2", "pp2,dp2,ep2,zero1", "dp4,ep2", "dp4,ep4"), 2),
        pytest.param(TOUR, 10, marks=pytest.mark.slow),
    ],
)
def test_replicas_of_experts_are_made_before_and_after_switches(layouts: tuple[str, ...], every: int) -> None:
    results = run_gloo(_balanced, 4, layouts, every)
    expected = plain_losses(every * len(layouts))
    for losses, copies in results:
        assert losses == pytest.approx(expected, abs=1e-9)
        assert all(made > 0 for made in copies), copies
    assert results[0][1]
