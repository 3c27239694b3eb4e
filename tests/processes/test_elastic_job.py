"""A job that switches its layout trains like one that never does, and keeps every bit of its state."""

from __future__ import annotations

import os
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from prophet.errors import SpecError, StageFailed, TransitionError
from tests.helpers.elastic_jobs import (
    DIM,
    MICROBATCHES,
    ROWS,
    VOCABULARY,
    batches,
    broken,
    build,
    check_held,
    dataset,
    make_optimizer,
    plain_losses,
    same,
    start,
    train,
    whole,
)
from tests.helpers.launch import run_gloo
from tests.helpers.releases import needs_orders

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
    assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]
    job.close()
    return losses


@pytest.mark.parametrize(("layouts", "every"), [(TOUR[:5], 1), pytest.param(TOUR, 20, marks=pytest.mark.slow)])
def test_a_job_that_switches_loses_nothing(layouts: tuple[str, ...], every: int) -> None:
    """`every` steps in each layout; the losses are those of one process that knows of no layout."""
    results = run_gloo(_tour, 4, layouts, every)
    expected = plain_losses(every * len(layouts))
    for losses in results:
        assert losses == pytest.approx(expected, abs=1e-9)


def _there_and_back(rank: int, size: int) -> None:
    job = start("pp2,dp2,zero1")
    fired = {"step": 0, "module": 0, "gradient": 0}
    job.optimizer.register_step_post_hook(lambda *_: fired.update(step=fired["step"] + 1))
    job.model[1].register_forward_hook(lambda *_: fired.update(module=fired["module"] + 1))
    watched = job.model[1].up.weight
    watched.register_post_accumulate_grad_hook(lambda _: fired.update(gradient=fired["gradient"] + 1))
    train(job, 3)
    before, generator, position = whole(job), torch.get_rng_state(), job.data.position
    counters = {id(p): float(s["step"]) for p, s in job.optimizer.state.items()}
    for text in ("pp4", "pp2,dp2,zero1", "pp2,dp2,zero1,order3:1:0:2", "dp1", "pp2,dp2,zero1"):
        job.switch(Parallelism.parse(text))
        assert same(whole(job), before)
        check_held(job)
    assert torch.equal(torch.get_rng_state(), generator)
    assert job.data.position == position == 3 * ROWS
    assert {id(p): float(s["step"]) for p, s in job.optimizer.state.items()} == counters
    given = sum(job.switch(Parallelism.parse("pp2,order3:1")).link_bytes.values())
    job.switch(Parallelism.parse("pp2,dp2"))
    job.switch(Parallelism.parse("dp1,order2"))
    chosen = job.switch(Parallelism.parse("dp2,orderfewest-bytes"))
    assert sorted(job.layout.rank_of_place) == [0, 2]
    assert sum(chosen.link_bytes.values()) > 0 < given
    assert set(chosen.link_bytes) == {(2, 0)}
    job.switch(Parallelism(dp=4))
    old = dict(fired)
    train(job, 1)
    each = MICROBATCHES // 4
    assert {k: fired[k] - old[k] for k in fired} == {"step": 1, "module": each, "gradient": each}


@needs_orders
def test_there_and_back_is_bit_identical() -> None:
    run_gloo(_there_and_back, 4)


def _evaluates(rank: int, size: int) -> list[float]:
    job = start("pp2,dp2")
    inputs, labels = dataset().tensors
    found = []
    for text in ("pp2,dp2", "pp3", "dp4,zero1"):
        job.switch(Parallelism.parse(text))
        train(job, 1)
        found.append(job.evaluate(inputs, labels))
        whole_loss = nn.functional.cross_entropy(_whole_model(job)(inputs), labels).item()
        assert found[-1] == pytest.approx(whole_loss, abs=1e-12)
        assert job.evaluate(inputs[:2], labels[:2]) > 0  # fewer rows than replicas
    with pytest.raises(SpecError, match="every rank needs the batch"):
        job.evaluate(None if rank == 1 else inputs, labels)
    train(job, 1)
    return found


def _whole_model(job: Job) -> nn.Module:
    model, state = build().eval(), whole(job)
    model.load_state_dict({n: state[n if n in state else "0.weight"] for n in model.state_dict()})
    return model


def test_evaluation_after_a_switch_and_with_data_on_some_ranks_only() -> None:
    results = run_gloo(_evaluates, 4)
    assert all(r == results[0] for r in results)


def _uneven(rank: int, size: int) -> list[float]:
    job = start("pp2,dp2", microbatches=4)
    job.model.eval()  # random numbers follow microbatches, whose number dp = 3 does not divide
    schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, 5, 0.9)
    losses = train(job, 2, schedule)
    job.switch(Parallelism(dp=3))
    losses += train(job, 2, schedule)
    job.switch(Parallelism(dp=4, zero=1))
    return losses + train(job, 2, schedule)


def test_a_batch_that_replicas_do_not_divide_is_weighted() -> None:
    expected = plain_losses(6, microbatches=1, training=False)
    for losses in run_gloo(_uneven, 4):
        assert losses == pytest.approx(expected, abs=1e-9)


def _refusals(rank: int, size: int) -> None:
    refused = {
        "pp2,dp2,zero2": "zero2 with pp2 cannot be trained",
        "dp2,ep2": "cannot train ep2",
    }
    for text, words in refused.items():
        with pytest.raises(SpecError, match=words):
            start(text)
    with pytest.raises(SpecError, match="needs rank 4, the world has 4"):
        start("dp5")
    job = start("pp2")
    before = whole(job)
    with pytest.raises(SpecError, match="tp2: a Sequential has no tensor-parallel plan"):
        job.switch(Parallelism(tp=2))
    with pytest.raises(SpecError, match=r"ranks \[2\] were given another layout than rank 0 \(dp2\)"):
        job.prepare(Parallelism(dp=3 if rank == 2 else 2))
    with pytest.raises(TransitionError, match=r"call prepare\(layout\) first"):
        job.switch()
    with pytest.raises(SpecError, match="cannot be cut into 12 microbatches"):
        start("pp2", data=[(torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int64))]).step()
    job.data.position += ROWS * (rank == 3)
    job.prepare(Parallelism(dp=2))
    with pytest.raises(SpecError, match=r"ranks \[3\] have another data position"):
        job.switch()
    job.data.position = 0
    assert same(whole(job), before)
    job.switch(Parallelism(dp=2))
    job.switch(Parallelism(dp=2, zero=1))
    with pytest.raises(SpecError, match=r"moves layers by job\.switch"):
        job.pipeline.rebuild(job.pipeline.stage_map)
    with pytest.raises(SpecError, match=r"trains by job\.step\(\)"):
        job.pipeline.step(None, None)


def test_what_cannot_be_trained_or_switched_is_refused_on_all_ranks() -> None:
    run_gloo(_refusals, 4)


def _orders(rank: int, size: int) -> tuple[list[str], Any]:
    from pipeline_balance.elastic import switching as module

    threads: list[str] = []
    inner = module.ordered

    def noted(*args: Any, **options: Any) -> Parallelism:
        threads.append(threading.current_thread().name)
        return inner(*args, **options)

    module.ordered = noted
    job = start("pp2")
    job.prepare(Parallelism.parse("dp2,orderfewest-bytes"))
    train(job, 1)
    job.switch()
    train(job, 1)
    return threads, job.layout.order


def test_the_order_of_ranks_is_chosen_beside_the_training() -> None:
    for threads, order in run_gloo(_orders, 2):
        assert len(threads) == 1
        assert threads != [threading.main_thread().name]
        assert order is None or sorted(order) == [0, 1]


def _broken(rank: int, size: int) -> list[str]:
    job = start("pp2,dp2,zero1")
    train(job, 1)
    said = []
    for place in ("collect", "group", "build", "allocate", "pack", "unpack", "assemble", "decide"):
        before = whole(job)
        with broken(job, place) if rank == 2 else nullcontext():
            job.prepare(Parallelism(pp=4))
            with pytest.raises(TransitionError) as caught:
                job.switch()
        said.append(str(caught.value))
        assert same(whole(job), before), place
        check_held(job)
        assert str(job.layout) == "pp2,dp2,zero1"
        train(job, 1)
    before = whole(job)
    job.switch(Parallelism(pp=4))
    assert same(whole(job), before)
    train(job, 1)
    return said


def test_a_failure_in_each_stage_leaves_the_old_state_and_goes_on() -> None:
    results = run_gloo(_broken, 4)
    for rank, said in enumerate(results):
        assert len(said) == 8
        for place, words in zip(("collect", "group", "build", "allocate"), said, strict=False):
            assert "whole" in words or "goes on" in words, (rank, place, words)
    assert all("broken in" in words for words in results[2])
    assert all("rank 2" in words or "ranks [2]" in words or "another rank" in words for words in results[0])


def _lost(rank: int, size: int) -> tuple[str, float]:
    """A process ends while it prepares a switch."""
    from pipeline_balance.elastic import switching as module

    job = start("pp2,dp2")
    train(job, 1)
    if rank == 2:
        pytest.MonkeyPatch().setattr(module, "ordered", lambda *_, **__: os._exit(1))
    job.prepare(Parallelism(pp=4, order="fewest-bytes"))
    began = time.monotonic()
    with pytest.raises(StageFailed) as lost:
        job.switch()
    with pytest.raises(StageFailed):
        job.step()
    return str(lost.value), time.monotonic() - began


def test_a_process_that_ends_while_it_prepares_is_named_before_the_limit() -> None:
    for rank, told in enumerate(run_gloo(_lost, 4, silent=[2])):
        if rank != 2:
            said, seconds = told
            assert "rank 2" in said
            assert "its process has ended" in said
            assert seconds < 30, "it has waited for the limit of 60 s"


def _in_place(rank: int, size: int) -> tuple[list[float], str]:
    job = start("pp2,dp2,zero1")
    optimizer, parameters = job.optimizer, list(job.model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    losses = train(job, 2, schedule)
    for text in ("pp4", "dp4,zero1", "pp2"):
        before = whole(job)
        report = job.switch(Parallelism.parse(text), mode="in-place")
        assert same(whole(job), before)
        check_held(job)
        assert job.optimizer is optimizer
        assert all(p is q for p, q in zip(parameters, job.model.parameters(), strict=True))
        assert report.peak_bytes > 0
        losses += train(job, 2, schedule)
    job.pipeline.mover.budget_bytes = 16
    with pytest.raises(TransitionError, match=r"a budget of|needs \d+ bytes"):
        job.switch(Parallelism(pp=4), mode="in-place")
    job.pipeline.mover.budget_bytes = 1 << 20
    losses += train(job, 1, schedule)
    job.prepare(Parallelism(pp=4))
    with broken(job, "unpack") if rank == 2 else nullcontext(), pytest.raises(StageFailed) as lost:
        job.switch(mode="in-place")
    assert all(p.is_meta for p in parameters)
    with pytest.raises(StageFailed):
        job.step()
    return losses, str(lost.value)


def test_a_switch_in_place_trains_on_and_its_failure_ends_the_job_on_all_ranks() -> None:
    for losses, said in run_gloo(_in_place, 4):
        assert losses == pytest.approx(plain_losses(9), abs=1e-9)
        assert "neither the old state nor the new one is whole" in said


def _on_meta(rank: int, size: int, layout: str) -> tuple[list[float], dict[str, Any]]:
    def without_memory() -> nn.Sequential:
        with torch.device("meta"):
            made = nn.Sequential(nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, DIM), nn.Tanh())
            made.append(nn.Linear(DIM, VOCABULARY, bias=False))
        made[-1].weight = made[0].weight
        return made.double()

    options: dict[str, Any] = {"data": batches(), "loss_fn": nn.functional.cross_entropy, "microbatches": 4}
    job = Job(without_memory, make_optimizer, Parallelism.parse(layout), **options)
    held_here = sum(p.numel() for p in job.model.parameters() if not p.is_meta)
    losses = train(job, 1)
    job.switch(Parallelism.parse("pp2" if layout == "pp4" else "pp4"))
    return [*losses, *train(job, 1)], {"held": held_here}


def test_a_model_built_on_meta_draws_the_same_weights_in_every_layout() -> None:
    one, four = run_gloo(_on_meta, 4, "dp1"), run_gloo(_on_meta, 4, "pp4")
    assert one[0][0] == pytest.approx(four[3][0], abs=1e-9)
    assert [said["held"] for _, said in one][1:] == [0, 0, 0]
    assert [said["held"] for _, said in four] == [VOCABULARY * DIM, DIM * DIM + DIM, 0, VOCABULARY * DIM]


def _steep(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 1e4 * nn.functional.cross_entropy(output, labels)


def _scaled(rank: int, size: int) -> tuple[list[float], list[float], set[float]]:
    """float32 with a scaler whose first scale overflows: every rank skips that update, and only that."""
    job = start("pp2,dp2,zero1", microbatches=4, loss_fn=_steep)
    job.model.float()
    scaler = job.scaler(init_scale=2.0**120, backoff_factor=2.0**-20, growth_interval=3)
    losses, scales = [], []
    for text in ("pp2,dp2,zero1", "dp1", "dp4,zero1"):
        job.switch(Parallelism.parse(text))
        for _ in range(3):
            losses.append(job.step(max_norm=0.5, scaler=scaler))
            scales.append(scaler.get_scale())
    steps = {float(tensor) for name, tensor in whole(job).items() if name.endswith("@step")}
    return losses, scales, steps


def test_a_scaler_goes_through_switches() -> None:
    results = run_gloo(_scaled, 4)
    assert all(r == results[0] for r in results)
    losses, scales, steps = results[0]
    assert scales == [2.0**100] * 3 + [2.0**101] * 3 + [2.0**102] * 3
    assert steps == {8.0}
    assert losses[-1] < losses[0]


def _owned(rank: int, size: int) -> None:
    found = []
    for text in ("dp3", "dp3,zero1", "pp2,dp2", "pp2,dp2,zero1"):
        job = start(text)
        train(job, 3)
        found.append(whole(job))
        kept = sum(t.numel() for entries in job.optimizer.state.values() for t in entries.values())
        everything = sum(t.numel() for name, t in found[-1].items() if "@" in name)
        if text == "dp3,zero1":
            assert kept < 0.6 * everything
    assert same(found[0], found[1])
    assert same(found[2], found[3])


def test_an_update_by_owners_has_the_bits_of_one_by_all() -> None:
    run_gloo(_owned, 4)
