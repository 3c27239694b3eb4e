"""A job of a transformers MoE goes through layouts with tp, experts over tp ranks and beside them, as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

pytest.importorskip("transformers", reason="tp needs a transformers model")

import prophet
from pipeline_balance import elastic
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.parallelism import Parallelism
from tests.helpers.elastic_jobs import check_held, same
from tests.helpers.launch import run_gloo
from tests.helpers.sliced_models import adam, batch_of, model_of

TOUR = ("tp2,dp2", "tp2,ep2,dp2,zero1", "pp2,tp2", "dp4,ep4", "tp4,ep2", "pp2,tp2,ep2,zero1", "dp2,ep2,pp2")
SAVED = "tp2,dp2,ep4,zero1"
MICROBATCHES, STEPS, MAX_NORM = 4, len(TOUR) + 3, 0.5
EXACT = 1e-10


def _plain() -> Any:
    return model_of("mixtral", num_key_value_heads=4, output_router_logits=False)


def _converted() -> Any:
    model = _plain()
    prophet.convert(model, group=elastic.one_rank())
    return model


def _batches() -> list[Any]:
    return [batch_of(rows=8, tokens=15, seed=step) for step in range(STEPS)]


def _alone() -> list[float]:
    model = _plain()
    optimizer, losses = adam(list(model.named_parameters())), []
    for inputs, labels in _batches():
        optimizer.zero_grad()
        loss = model(**inputs, labels=labels, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _job(layout: str) -> Job:
    given: dict[str, Any] = {"microbatches": MICROBATCHES, "timeout_s": 60.0}
    return Job(_converted, adam, Parallelism.parse(layout), data=_batches(), **given)


def _tour(rank: int, size: int, folder: str) -> dict[str, Any]:
    job = _job(TOUR[0])
    losses, kept = [job.step(max_norm=MAX_NORM)], []
    for layout in TOUR[1:]:
        before = job.state_dict()
        job.switch(Parallelism.parse(layout))
        kept.append(same(before, job.state_dict()))
        check_held(job)
        losses.append(job.step(max_norm=MAX_NORM))
    job.switch(Parallelism.parse(SAVED))
    losses.append(job.step(max_norm=MAX_NORM))
    job.save(folder)
    before = job.state_dict()
    job.close()
    job = _job("pp2,tp2,ep2")
    job.load(folder)
    kept.append(same(before, job.state_dict()))
    losses += [job.step(max_norm=MAX_NORM) for _ in range(2)]
    job.close()
    return {"losses": losses, "kept": kept}


def test_a_model_with_experts_goes_through_layouts_with_tp(tmp_path: Path) -> None:
    losses = _alone()
    for result in run_gloo(_tour, 4, str(tmp_path)):
        assert result["losses"] == pytest.approx(losses, rel=EXACT)
        assert result["kept"] == [True] * len(TOUR)
