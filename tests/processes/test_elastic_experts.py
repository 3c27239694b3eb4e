"""A job shares experts over ep ranks, and moves them to other homes when ep changes: exactly, with their moments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import prophet
from pipeline_balance import elastic
from pipeline_balance.elastic import balance
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from prophet.errors import SpecError, StageFailed, TransitionError
from tests.helpers.elastic_experts import (
    build,
    build_lopsided,
    build_modules,
    build_on_meta,
    plain_losses,
    start,
    whole,
)
from tests.helpers.elastic_jobs import broken, check_held, dataset, same, train
from tests.helpers.launch import run_gloo
from tests.helpers.releases import needs_orders
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


@needs_orders
@pytest.mark.parametrize(
    ("layouts", "every"),
    [
        (TOUR[:6], 1),
        # who had the same experts as another has different ones after the first step
        (("dp4,ep2", "dp4,ep2,order0:2:1:3"), 1),
        pytest.param(TOUR, 20, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        *(pytest.param((text,), 30, marks=pytest.mark.slow) for text in ("dp4,ep4", "dp4,ep2", "pp2,dp2,ep2,zero1")),
    ],
)
def test_a_job_that_changes_ep_loses_nothing(layouts: tuple[str, ...], every: int) -> None:
    """`every` steps in each layout; the losses are those of one process that has all experts."""
    results = run_gloo(_tour, 4, layouts, every)
    expected = plain_losses(every * len(layouts))
    for losses in results:
        assert losses == pytest.approx(expected, abs=1e-9)


def _remembered(job: Job) -> dict[str, Any]:
    """What all engines remember, by layer and group."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, job._switching.experts.export_memory(job.layout))
    return {f"{name} {group}": memory for said in every for name, (group, memory) in said.items()}


def _balanced(rank: int, size: int, layouts: tuple[str, ...], every: int) -> tuple[list[float], list[int]]:
    config = prophet.EngineConfig(planner=RandomPlanner(5, 0.8), slots_per_rank=4)
    job = start(layouts[0], balance_experts=config)
    losses = train(job, every)
    copies, balanced_steps = [], every if job.layout.ep > 1 else 0
    for text in layouts[1:]:
        state, before, known, engine = whole(job), job.layout, _remembered(job), job.engine
        job.switch(Parallelism.parse(text))
        assert same(whole(job), state)
        check_held(job)
        assert engine is None or engine._closed
        if (before.ep, before.edp) == (job.layout.ep, job.layout.edp):
            assert _remembered(job) == known
        losses += train(job, 1)
        if job.engine is not None:  # placements are in force at once
            assert job.engine.last_step is not None
            copies.append(int(job.engine.last_step.copies.sum()))
        losses += train(job, every - 1)
        if job.layout.ep > 1:
            balanced_steps += every
            assert job.engine is None or job.engine.step == balanced_steps
            assert job.engine is None or {x.history.observed for x in job.engine.balanced} == {balanced_steps}
    job.close()
    return losses, copies


@pytest.mark.parametrize(
    ("layouts", "every"),
    [
        (("dp2,ep2", "pp2,dp2,ep2,zero1", "dp4,ep4"), 1),
        pytest.param(TOUR, 10, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_replicas_of_experts_are_made_before_and_after_switches(layouts: tuple[str, ...], every: int) -> None:
    results = run_gloo(_balanced, 4, layouts, every)
    expected = plain_losses(every * len(layouts))
    for losses, copies in results:
        assert losses == pytest.approx(expected, abs=1e-9)
        assert all(made > 0 for made in copies), copies
    assert results[0][1]


def _lopsided(rank: int, size: int) -> list[float]:
    job = start("dp4,ep4", build_lopsided)
    losses = train(job, 2)
    job.switch(Parallelism.parse("dp4,ep2,zero1"))
    return losses + train(job, 2)


@pytest.mark.slow
def test_experts_that_no_token_visits_are_updated_as_in_one_process() -> None:
    for losses in run_gloo(_lopsided, 4):
        assert losses == pytest.approx(plain_losses(4, build_lopsided), abs=1e-9)


def _modules(rank: int, size: int) -> list[float]:
    job = start("pp2,dp2,zero1", build_modules)
    losses = train(job, 2)
    for text in ("dp4", "pp3", "dp2,zero1"):
        before = whole(job)
        job.switch(Parallelism.parse(text))
        assert same(whole(job), before)
        losses += train(job, 2)
    return losses


@pytest.mark.slow
def test_experts_that_are_modules_go_through_layouts_that_have_them_whole() -> None:
    for losses in run_gloo(_modules, 4):
        assert losses == pytest.approx(plain_losses(8, build_modules), abs=1e-9)


def _on_meta(rank: int, size: int) -> list[dict[str, torch.Tensor]]:
    found = [whole(start(text, build_on_meta)) for text in ("dp1", "dp4,ep4", "pp2,dp2,ep2")]
    job = start("dp4,ep4", build_on_meta)
    every = sum(t.numel() for name, t in found[0].items() if ".experts." in name)
    assert 4 * sum(p.numel() for p in job.model[1].moe.experts.parameters()) == every
    return found


@pytest.mark.slow
def test_experts_built_on_meta_draw_the_same_values_in_every_layout() -> None:
    for one, shared, staged in run_gloo(_on_meta, 4):
        assert same(one, shared)
        assert same(one, staged)


def _goes_on(rank: int, size: int) -> None:
    job = start("pp2,dp2,ep2,zero1")
    train(job, 1)
    inputs, labels = dataset().tensors
    for text, place in (("dp4,ep2", "allocate"), ("dp4,ep4", "decide")):
        before = whole(job)
        with broken(job, place) if rank == 2 else nullcontext():
            job.prepare(Parallelism.parse(text))
            with pytest.raises(TransitionError, match="whole"):
                job.switch()
        assert same(whole(job), before)
        assert bool(job.state_dict()) == (rank == 0)
        train(job, 1)
        check_held(job)
        job.switch(Parallelism.parse(text))
        model = _whole_model(job)
        expected = nn.functional.cross_entropy(model(inputs), labels).item()
        assert job.evaluate(inputs, labels) == pytest.approx(expected, abs=1e-12)
        assert job.evaluate(inputs[:2], labels[:2]) > 0  # fewer rows than replicas
    for text in ("pp2,dp2,ep2", "pp2"):
        job.switch(Parallelism.parse(text))
        saved = job.state_dict()
        assert (not saved) == (rank > 0)
        assert rank or same(saved, dict(model.state_dict()))
    refused = {
        "dp4,zero2": "zero2 with experts",
        "tp2,dp2": "tp2: a Sequential has no tensor-parallel plan",
        "dp3,tp3,ep9": "12 experts cannot be shared by ep9",
        "tp2,slices2": "tp2: a Sequential has no tensor-parallel plan",
    }
    for text, words in refused.items():
        with pytest.raises(SpecError, match=words):
            job.prepare(Parallelism.parse(text))


def _whole_model(job: Job) -> nn.Module:
    model, state = build().eval(), whole(job)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(state[name])
    return model


def test_a_job_with_experts_evaluates_and_goes_on_after_failures_and_refusals() -> None:
    run_gloo(_goes_on, 4)


def _begins(rank: int, size: int) -> list[str]:
    def said(build_it: Callable[[], nn.Module], text: str, **options: Any) -> str:
        with pytest.raises(SpecError) as caught:
            start(text, build_it, **options)
        return str(caught.value)

    def experts(**options: Any) -> Callable[[], nn.Module]:
        given = {"group": elastic.one_rank(), "impl": "naive", "num_experts": 6, **options}
        return lambda: nn.Sequential(prophet.MoE(4, **given))

    config = prophet.EngineConfig(topology=prophet.Topology.uniform(4))
    return [
        said(experts(hidden=4, group=None), "dp2,ep2"),
        said(experts(hidden=4, num_experts=5), "dp2,ep2"),
        said(experts(expert=lambda: nn.Linear(4, 4)), "dp2,ep2"),
        said(experts(hidden=4, gate=prophet.GateConfig(bias_update_rate=0.1)), "dp2,ep2"),
        said(experts(hidden=4), "dp2,ep2", balance_experts=config),
        said(lambda: nn.Sequential(nn.Linear(4, 4)), "dp2,ep2"),
    ]


def _one_cannot_attach(rank: int, size: int) -> str:
    def attach(*given: Any, **options: Any) -> Any:
        if rank == 1:
            raise ArithmeticError("no engine today")
        return prophet.attach(*given, **options)

    job = start("dp2", balance_experts=prophet.EngineConfig(topology="uniform"), timeout_s=3.0)
    train(job, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance, "attach", attach)
        with pytest.raises(StageFailed) as caught:
            job.switch(Parallelism.parse("dp2,ep2"))
    return f"{caught.value.rank} in {caught.value.action}: {caught.value.cause}"


def test_where_one_rank_cannot_attach_the_others_of_its_column_hear_why() -> None:
    """They wait for it in what attaching compares, until the limit."""
    for said in run_gloo(_one_cannot_attach, 2):
        assert said == "1 in balancing experts before step 1: RuntimeError: experts are not balanced: no engine today"


@pytest.mark.slow
def test_experts_that_cannot_be_shared_are_refused_on_all_ranks() -> None:
    every = run_gloo(_begins, 2)
    assert every[0] == every[1]
    split, uneven, modules, biases, machine, dense = every[0]
    assert "0 has 3 of its 6 experts here, expected all of them: give it a group of one rank" in split
    assert "0: 5 experts cannot be shared by ep2" in uneven
    assert "0: experts that are modules stay whole on every rank: expected ep1, got ep2" in modules
    assert "0: only an engine updates balancing biases" in biases
    assert "the topology has 4 ranks, dp2,ep2 shares experts over 2" in machine
    assert "a job cannot train ep2 with a model that has no prophet.MoE layer" in dense
