"""Tensors that are registered with parameters travel with them through a job's switches, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeline_balance import elastic
from prophet.errors import SpecError, TransitionError
from tests.helpers.elastic_jobs import start, train
from tests.helpers.launch import run_gloo
from tests.helpers.own_loops import gathered, same

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
