"""Switches in place, of every kind of layout: what they keep, what they take, and what is left after a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from pipeline_balance import elastic
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from prophet.errors import StageFailed, TransitionError
from prophet.state import transition
from tests.helpers import elastic_experts, elastic_jobs
from tests.helpers.elastic_jobs import broken, same, train
from tests.helpers.launch import run_gloo
from tests.helpers.metering import metered, state_of, storages
from tests.helpers.releases import needs_orders
from tests.helpers.sliced_models import adam, batch_of, model_of

Whole = Callable[[Job], dict[str, torch.Tensor]]


def _transformers(layout: str) -> Job:
    data = [batch_of(kind) for kind in ("plain", "packed", "padded")]
    make = lambda: model_of("llama", attention_bias=True, num_hidden_layers=4)  # noqa: E731
    return Job(make, adam, Parallelism.parse(layout), data=data, microbatches=4, seed=3, timeout_s=60.0)


# how to begin, what all have, and the ratio that is aimed at: of the row's few tensors one is a tenth of a rank's state
STARTS: dict[str, tuple[Callable[[str], Job], Whole, float]] = {
    "row": (elastic_jobs.start, elastic_jobs.whole, 1.25),
    "transformers": (_transformers, elastic_jobs.whole, 1.10),
    "experts": (elastic_experts.start, elastic_experts.whole, 1.25),
}
# each is gone to and back from, in this order
PAIRS = {
    "row": ("pp2,dp2,zero1", ("pp4", "dp4,zero3", "dp3,zero2", "dp2,zero3,order3:1")),
    "transformers": ("pp2,tp2", ("dp2,tp2,zero1", "pp2,dp2", "dp2,tp2,zero3", "dp4,zero2", "dp1")),
    "experts": ("pp2,dp2,ep2,zero1", ("dp4,ep4", "pp2,dp2", "dp4,ep2,zero1", "dp1")),
}

KINDS = ["row", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("transformers", "experts"))]
STAYS = "pp2,dp2"  # back from there, experts have nothing to send


def _walk(kind: str, *, in_place: bool) -> tuple[list[float], list[tuple[str, float]]]:
    """Losses of a step in every layout, and the ratio of every switch."""
    begin, whole, target = STARTS[kind]
    first, others = PAIRS[kind]
    job = begin(first)
    losses, ratios = train(job, 1), []
    for other in others:
        for text in (other, first):
            if not in_place:
                job.switch(Parallelism.parse(text))
                losses += train(job, 1)
                continue
            before, optimizer = whole(job), job.optimizer
            old = list(storages(t for t in state_of(job) if t.dim() and t.numel()).values())
            report, measured, ratio = metered(job, Parallelism.parse(text), mode="in-place")
            assert same(whole(job), before), text
            assert report.peak_bytes == measured, (text, report.peak_bytes, measured)
            assert ratio <= target, (text, ratio)
            assert job.optimizer is optimizer
            kept = storages(state_of(job))
            left = [s.nbytes() for s in old if s.nbytes() and s._cdata not in kept]
            assert not left, (text, left)
            ratios.append((text, ratio))
            losses += train(job, 1)
    job.close()
    return losses, ratios


def _there_and_back(rank: int, size: int, kind: str) -> list[tuple[str, float]]:
    losses, ratios = _walk(kind, in_place=True)
    safe, _ = _walk(kind, in_place=False)
    assert losses == pytest.approx(safe, rel=1e-10)
    return ratios


@needs_orders
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_in_place_has_the_bits_the_losses_and_the_peak(kind: str) -> None:
    every = run_gloo(_there_and_back, 4, kind, timeout_s=150.0)
    for at, (text, _) in enumerate(every[0]):
        print(f"{kind} to {text}: {max(ratios[at][1] for ratios in every):.3f} of the larger state")


def _refused(rank: int, size: int, kind: str) -> None:
    """What does not fit, and what cannot be built, is refused with nothing lost."""
    begin, whole, _ = STARTS[kind]
    first, others = PAIRS[kind]
    job = begin(first)
    losses = train(job, 1)
    for other in (o for o in others[:2] if o != STAYS):
        for text in (other, first):
            before = whole(job)
            mover, layout = job.pipeline.mover, job.layout
            budget, mover.budget_bytes = mover.budget_bytes, 1  # less than an element
            with pytest.raises(TransitionError, match=r"a budget of|needs \d+ bytes beyond"):
                job.switch(Parallelism.parse(text), mode="in-place")
            mover.budget_bytes = budget
            job.prepare(Parallelism.parse(text))
            refused = pytest.raises(TransitionError, match=r"broken in build|could not prepare")
            with broken(job, "build") if rank == 2 else nullcontext(), refused:
                job.switch(mode="in-place")
            assert same(whole(job), before), text
            assert job.layout == layout
            losses += train(job, 1)
            before = whole(job)
            job.switch(Parallelism.parse(text), mode="safe")
            assert same(whole(job), before), text


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_refused_and_a_safe_switch_goes(kind: str) -> None:
    run_gloo(_refused, 4, kind, timeout_s=150.0)


@contextmanager
def _breaks(job: Job, place: str) -> Iterator[None]:
    """On this process, something fails in the middle of the move or when all has come."""
    if place != "middle":
        with broken(job, place):
            yield
        return
    unpack, calls = transition._Mover._unpack, [0]

    def fails(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise MemoryError("no memory is left")
        unpack(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transition._Mover, "_unpack", fails)
        yield


def _fails(rank: int, size: int, kind: str, first: str, other: str, place: str) -> str:
    job = STARTS[kind][0](first)
    train(job, 1)
    old = list(job.model.parameters())
    for number, parameter in enumerate(old):
        if number % 2:
            elastic.register("ema", parameter.detach().clone(), parameter)
    job.pipeline.mover.budget_bytes = 1 << 14  # more than a few rounds
    job.prepare(Parallelism.parse(other))
    with _breaks(job, place) if rank == 2 else nullcontext(), pytest.raises(StageFailed) as lost:
        job.switch(mode="in-place")
    assert all(t.is_meta for t in state_of(job))
    assert not job.optimizer.state
    assert all(p.is_meta for group in job.optimizer.param_groups for p in group["params"])
    for parameter in old:  # nobody reads memory that has gone
        assert getattr(parameter, "_local_tensor", parameter).is_meta
    with pytest.raises(StageFailed):
        job.step()
    with pytest.raises(StageFailed):
        job.switch(Parallelism.parse(first))
    return str(lost.value)


@pytest.mark.parametrize(
    ("kind", "first", "other", "place"),
    [
        ("row", "pp2,dp2,zero1", "dp4,zero3", "middle"),
        pytest.param("row", "dp4,zero3", "pp4", "middle", marks=pytest.mark.slow),
        pytest.param("transformers", "dp2,tp2,zero3", "pp2,tp2", "middle", marks=pytest.mark.slow),
        pytest.param("transformers", "pp2,tp2", "dp2,tp2,zero1", "decide", marks=pytest.mark.slow),
        pytest.param("row", "pp2,dp2", "dp4", "assemble", marks=pytest.mark.slow),
        pytest.param("experts", "pp2,dp2,ep2,zero1", "dp4,ep4", "middle", marks=pytest.mark.slow),
        pytest.param("row", "dp4,zero3", "dp3,zero2", "decide", marks=pytest.mark.slow),
    ],
)
def test_a_failure_on_the_way_is_one_of_all_processes(kind: str, first: str, other: str, place: str) -> None:
    words = {"middle": "no memory is left"}.get(place, f"broken in {place}")
    every = run_gloo(_fails, 4, kind, first, other, place, timeout_s=100.0)
    lost = (words, "ranks [2] were not ready")  # in the words of the first to tell
    assert all(any(said in told for said in lost) for told in every), every
