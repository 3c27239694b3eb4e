"""Tensors that are registered with parameters travel with them through a job's switches, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline_balance import elastic
from pipeline_balance.pipeline.model.ownership import local
from prophet.errors import SpecError, TransitionError
from tests.helpers import elastic_experts
from tests.helpers.elastic_jobs import check_held, start, train
from tests.helpers.launch import run_gloo
from tests.helpers.own_loops import gathered, same
from tests.helpers.sliced_models import adam, batch_of, model_of

TOUR = ("pp2,dp2,zero1", "dp3,zero3", "pp4", "dp4,zero2", "dp2")


def _averages(rank: int, size: int) -> dict[str, float]:
    job = start(TOUR[0])
    means = {n: elastic.register("ema", p.detach().clone(), p) for n, p in job.model.named_parameters()}

    def now() -> dict[str, Tensor]:
        return gathered({n: handle.tensor for n, handle in means.items()})

    for text in TOUR[1:]:
        before = now()
        job.switch(elastic.Parallelism.parse(text))
        assert same(before, now()), text
        train(job, 1)
        for name, p in job.model.named_parameters():
            assert means[name].tensor.is_meta == p.is_meta
            if not p.is_meta:
                means[name].tensor.lerp_(p.detach(), 0.1)
        assert not any("ema" in entries for entries in job.optimizer.state.values())
    if rank:  # a rank that moves it there, and one that does not know of it
        elastic.register("other", _like(job), next(job.model.parameters()))
    before = now()
    with pytest.raises(TransitionError, match=r"0.weight%other"):
        job.switch(elastic.Parallelism(pp=2))
    assert same(before, now())
    job.close()
    return {name: float(t.sum()) for name, t in now().items()}


def _doubles(rank: int, size: int, begin: Callable[[str], elastic.Job], layouts: tuple[str, ...]) -> None:
    """What is registered is twice its parameter, whatever part of that is here."""
    job = begin(layouts[0])
    job.step()
    twice = {n: elastic.register("twice", 2 * p.detach(), p) for n, p in job.model.named_parameters()}
    for text in layouts[1:]:
        job.switch(elastic.Parallelism.parse(text))
        check_held(job)
        for again in range(2):
            for name, p in job.model.named_parameters():
                tensor = twice[name].tensor
                assert (tensor.shape, tensor.is_meta, type(tensor)) == (p.shape, p.is_meta, type(p.detach())), text
                assert p.is_meta or torch.equal(local(tensor), 2 * local(p).detach()), f"{name} in {text}"
            if not again:
                job.step()
            for name, p in job.model.named_parameters():
                if not p.is_meta:
                    local(twice[name].tensor).copy_(2 * local(p).detach())
    job.close()


def _llama(layout: str) -> elastic.Job:
    data = [batch_of("plain")]
    options: dict[str, Any] = {"data": data, "microbatches": 4, "timeout_s": 60.0}
    return elastic.Job(lambda: model_of("llama"), adam, elastic.Parallelism.parse(layout), **options)


@pytest.mark.parametrize(
    ("begin", "layouts"),
    [
        (elastic_experts.start, ("pp2,dp2,ep2,zero1", "dp4,ep4", "pp2", "dp4,ep2", "dp2,ep2")),
        pytest.param(_llama, ("pp2,tp2", "dp2,tp2,zero2", "pp2,tp2,order3:1:0:2", "pp4"), marks=pytest.mark.slow),
    ],
)
def test_what_is_registered_is_cut_as_its_parameter(
    begin: Callable[[str], elastic.Job], layouts: tuple[str, ...]
) -> None:
    run_gloo(_doubles, 4, begin, layouts, timeout_s=200.0)


def _like(job: elastic.Job) -> Tensor:
    return torch.zeros_like(next(job.model.parameters()).detach())


def test_averages_travel_with_their_parameters() -> None:
    first, *others = run_gloo(_averages, 4, timeout_s=100.0)
    assert len(first) == 17
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("name", "tensor", "wrong"),
    [
        ("ema", torch.zeros(3), "lies as its parameter does"),
        ("ema", torch.zeros(2, 3, device="meta"), "lies as its parameter does"),
        ("e@a", torch.zeros(2, 3), "without #, @ and %"),
        ("ema", torch.zeros(2, 3, requires_grad=True), "detached"),
    ],
)
def test_a_tensor_that_cannot_travel_with_a_parameter_is_refused(name: str, tensor: Tensor, wrong: str) -> None:
    with pytest.raises(SpecError, match=wrong):
        elastic.register(name, tensor, nn.Parameter(torch.ones(2, 3)))
    with pytest.raises(SpecError, match="expected a parameter"):
        elastic.register("ema", torch.ones(2, 3), torch.ones(2, 3))


def test_a_handle_stays_the_same() -> None:
    weight = nn.Parameter(torch.ones(2))
    handle = elastic.register("ema", torch.zeros(2), weight)
    other = torch.ones(2)
    assert elastic.register("ema", other, weight) is handle
    assert handle.tensor is other
