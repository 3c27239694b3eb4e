"""Modules of shards are made while training goes on, and are in force as if the switch had made them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from pipeline_balance import elastic
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.elastic.shards import job_state
from pipeline_balance.elastic.shards import sharded as shards
from prophet.errors import SpecError, TransitionError
from tests.helpers.elastic_jobs import check_held, same, start, train, whole
from tests.helpers.launch import run_gloo
from tests.helpers.noted import noted
from tests.helpers.sliced_models import adam, batch_of, model_of

MAKING = ((job_state, "sharded"), (shards, "fully_shard"), (shards, "parallelize_module"))


def _by_main(found: set[tuple[str, bool]]) -> set[tuple[str, bool]]:
    return {(name, main) for name, main in found if main}


def _llama(layout: str) -> Job:
    given: dict[str, Any] = {"data": [batch_of()], "microbatches": 4, "timeout_s": 60.0}
    return elastic.Job(lambda: model_of("llama", tied=True), adam, Parallelism.parse(layout), **given)


def _prepared(job: Job, text: str) -> None:
    job.prepare(Parallelism.parse(text))
    job._switching.prepared()


def _ahead(rank: int, size: int) -> None:
    for job, layouts in (
        (start("dp2"), ("dp2,zero3", "dp2,zero2", "pp2", "dp2,zero2")),
        (_llama("pp2"), ("tp2", "dp2,zero3", "tp2", "pp2", "tp2")),
    ):
        train(job, 1)
        for text in layouts:
            drawn = torch.get_rng_state()
            with noted(*MAKING) as found:
                _prepared(job, text)
            assert torch.equal(torch.get_rng_state(), drawn)
            assert bool(found) == (text != "pp2"), text
            assert not _by_main(found), text
            train(job, 1)
            before = whole(job)
            with noted(*MAKING) as found:
                job.switch()
            assert not found, text
            assert same(whole(job), before), text
            check_held(job)
        train(job, 1)
        job.close()


def test_the_thread_that_prepares_makes_the_modules() -> None:
    run_gloo(_ahead, 2, timeout_s=120.0)


def _meanwhile(job: Job, fired: list[int], parts: list[nn.Module]) -> None:
    """What users change between two steps, in any layout."""
    embedding, block, still, last, *_ = parts
    block.requires_grad_(False)
    still.eval()
    del last.mark
    last.new = [1]
    still.scale = torch.tensor(2.0, dtype=torch.float64)  # another buffer
    embedding.register_forward_hook(lambda *_: fired.append(1))


def _changed(rank: int, size: int, text: str, back: str) -> list[float]:
    """Losses of a job that was prepared before its model changed, and of one that was not."""
    every: list[list[float]] = []
    for ahead in (True, False):
        job, fired = start("dp2"), [0]
        losses = train(job, 1)
        for layout in (text, back, text):
            job.model[3].mark = 1
            job.model[1].requires_grad_(True)
            job.model[2].train()
            if ahead:
                _prepared(job, layout)
            losses += train(job, 1)
            _meanwhile(job, fired, list(job.model))
            with noted(*MAKING) as found:
                job.switch(None if ahead else Parallelism.parse(layout))
            assert not _by_main(found)
            _, block, still, last, *_ = job.model
            assert not any(p.requires_grad for p in block.parameters())
            assert all(p.requires_grad for p in still.parameters())
            assert (block.training, still.training, still.drop.training) == (True, False, False)
            assert not hasattr(last, "mark")
            assert (last.new, float(still.scale)) == ([1], 2.0)
            fired.clear()
            losses += train(job, 1)
            assert fired
        every.append(losses)
        job.close()
    assert every[0] == every[1]
    return every[0]


@pytest.mark.parametrize(
    ("text", "back"), [("dp2,zero3", "dp2"), pytest.param("dp2,zero2", "dp2,zero3", marks=pytest.mark.slow)]
)
def test_what_changes_after_the_preparation_goes_along(text: str, back: str) -> None:
    one, other = run_gloo(_changed, 2, text, back, timeout_s=120.0)
    assert one == other


def _replaced(rank: int, size: int) -> None:
    """A module that is another one, or of another class, once modules were made for the one before."""
    job = start("dp2")
    train(job, 1)
    for steps, kind in enumerate((nn.Identity, nn.Dropout1d)):
        _prepared(job, "dp2,zero3")
        job.model[2].drop = kind()
        train(job, steps)
        before = whole(job)
        with noted(*MAKING) as found:
            job.switch()
        assert found
        assert found == _by_main(found)
        assert type(job.model[2].drop) is kind
        assert same(whole(job), before)
        train(job, 1)
        job.switch(Parallelism.parse("dp2"))
    job.close()


def test_modules_that_no_longer_fit_are_made_anew() -> None:
    run_gloo(_replaced, 2, timeout_s=120.0)


def _dropped(rank: int, size: int) -> None:
    job = start("dp2")
    train(job, 1)

    def made() -> Any:
        _prepared(job, "dp2,zero3")
        return weakref.ref(job._switching.prepared().target.ahead)  # type: ignore[union-attr, arg-type]

    def gone(model: Any) -> bool:
        gc.collect()
        return model() is None

    model = made()
    assert not gone(model)
    assert all(p.is_meta for p in model().root.parameters())
    job.prepare(Parallelism.parse("pp2"))
    assert gone(model)
    model, graph = made(), job.model[2].up.weight.sum()
    with pytest.raises(SpecError, match="is held by an autograd graph"):
        job.switch()
    del graph
    assert gone(model)
    model = made()
    handle = job.model[2].up.weight.register_hook(lambda g: g)
    with pytest.raises(TransitionError, match="has a hook on the tensor"):
        job.switch()
    handle.remove()
    assert gone(model)
    job.switch(Parallelism.parse("dp2,zero3"))
    model = weakref.ref(job.pipeline.model)
    job.switch(Parallelism.parse("dp2"))
    assert gone(model)
    job.close()


def test_what_was_made_and_not_used_is_dropped() -> None:
    run_gloo(_dropped, 2, timeout_s=120.0)


def _losses(rank: int, size: int) -> list[list[float]]:
    every = []
    for prepares in (True, False):
        torch.manual_seed(0)
        losses: list[float] = []
        for job, layouts in ((start("dp2"), ("dp2,zero3", "dp2,zero2")), (_llama("tp2"), ("dp2,zero3", "tp2"))):
            losses += train(job, 1)
            for text in layouts:
                if prepares:
                    job.prepare(Parallelism.parse(text))
                losses += [torch.rand(()).item(), *train(job, 2)]
            job._switching.prepared()
            losses += train(job, 1)
            job.close()
        every.append(losses)
    return every


def test_a_preparation_changes_no_bit_of_the_training() -> None:
    for with_it, without in run_gloo(_losses, 2, timeout_s=120.0):
        assert with_it == without
