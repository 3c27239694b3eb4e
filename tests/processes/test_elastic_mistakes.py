"""A job says one process's mistake on all of them, and goes on where it can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipeline_balance.elastic.layouts.parallelism import Parallelism
from prophet.errors import SpecError, TransitionError
from tests.helpers.elastic_jobs import ROWS, batches, build, dataset, start, train
from tests.helpers.launch import run_gloo


def _said(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


class _Stateful(nn.Module):
    """Has a buffer on `meta` and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros((), device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def _fails() -> Any:
    raise OSError("no such file")


def _begins(rank: int, size: int) -> list[str]:
    from pipeline_balance.elastic import Job

    def make(build_it: Callable[[], Any], layout: Any = None, **more: Any) -> Job:
        options: dict[str, Any] = {**more, "data": batches(), "loss_fn": nn.functional.mse_loss, "microbatches": 2}
        optimizer = lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)  # noqa: E731
        return Job(build_it, optimizer, layout or Parallelism(pp=2), timeout_s=30.0, **options)

    return [
        _said(SpecError, lambda: make(_fails if rank == 1 else build)),
        _said(SpecError, lambda: make(build, "pp2" if rank == 1 else Parallelism(pp=2))),
        _said(SpecError, lambda: make(build, Parallelism(pp=2) if rank == 1 else Parallelism(dp=2))),
        _said(SpecError, lambda: make(lambda: [*build(), _Stateful()])),
        *(_said(SpecError, partial(make, build, nodes=nodes)) for nodes in ([0], [0, 0.5], [0, rank])),
    ]


def test_a_job_begins_on_all_processes_or_on_none() -> None:
    every = run_gloo(_begins, 2)
    assert every[0] == every[1]
    failed, text, differ, buffer, few, half, others = every[0]
    assert "nodes: expected 2 whole numbers from 0 on, a process's node each, got [0]" in few
    assert "got [0, 0.5]" in half
    assert others == "ranks begin with different layouts: ['pp2 on nodes [0, 0]', 'pp2 on nodes [0, 1]']"
    assert failed == "beginning a job: rank 1: OSError: no such file"
    assert "rank 1: SpecError: expected a layout, such as elastic.Parallelism(pp=2), got 'pp2'" in text
    assert differ == "ranks begin with different layouts: ['dp2', 'pp2']"
    assert "buffers on meta" in buffer


class _Loader:
    """Gives what `Batches` gives, and fails on one process at the second batch."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def __iter__(self) -> Iterator[Any]:
        data = batches()
        yield data.read(0, ROWS)
        if self.fails:
            raise OSError("the loader has lost its files")
        data.advance()
        yield data.read(0, ROWS)


def _goes_on(rank: int, size: int) -> list[str]:
    job = start("pp2")
    losses = train(job, 1)
    told = [_said(SpecError, lambda: job.prepare("pp1" if rank == 1 else Parallelism(pp=1)))]  # type: ignore[arg-type]
    # what a user keeps: a plain number and a tensor for each parameter that is here
    for p in job.model.parameters():
        if not p.is_meta:
            job.optimizer.state[p] |= {"seen": 7, "ema": p.detach().clone()}
    job.switch(Parallelism(dp=2, zero=1))
    assert all("ema" in kept and kept["seen"] == 7 for kept in job.optimizer.state.values())
    for p in job.model.parameters():  # a hook that counts on those that are not updated here, too
        if not p.is_meta:
            job.optimizer.state[p]["seen"] = 8 if "exp_avg" in job.optimizer.state[p] else 0
    job.switch(Parallelism(dp=2))
    assert all(kept["seen"] == 8 for kept in job.optimizer.state.values())
    if rank == 1:
        for kept in job.optimizer.state.values():
            kept.pop("ema")
    job.prepare(Parallelism(pp=2))
    told.append(_said(TransitionError, job.switch))
    if rank != 1:
        for kept in job.optimizer.state.values():
            kept.pop("ema")
    assert str(job.layout) == "dp2"
    # spare processes that come in evaluate at once what the others do
    job.switch(Parallelism(pp=1))
    train(job, 1)
    assert len(job.pipeline.measure()) == len(job.pipeline.model.units)  # with spare processes
    inputs, labels = (t[: 2 * ROWS] for t in dataset().tensors)
    want = job.evaluate(inputs, labels)
    told.append(_said(SpecError, lambda: job.evaluate(inputs if rank else 5, labels)))
    told.append(_said(SpecError, lambda: job.evaluate(inputs[:0], labels[:0])))
    job.switch(Parallelism(pp=3))
    assert job.evaluate(inputs, labels) == pytest.approx(want, rel=1e-12)
    job.close()
    streamed = start("pp2", data=_Loader(rank == 2))  # rank 2 is spare
    train(streamed, 1)
    told.append(_said(SpecError, streamed.step))
    return [*told, str(losses)]


def test_a_mistake_on_one_process_is_named_on_all_and_the_job_goes_on() -> None:
    every = run_gloo(_goes_on, 3, timeout_s=120.0)
    assert every[0] == every[1] == every[2]
    text, lacks, number, nothing, lost, _ = every[0]
    assert number.startswith("rank 0: AttributeError")
    assert nothing.endswith("there is no row to evaluate")
    assert "rank 1: expected a layout" in text
    assert "rank 1 does not keep" in lacks
    assert "@ema, which others do" in lacks
    assert lost == "rank 2: OSError: the loader has lost its files"
