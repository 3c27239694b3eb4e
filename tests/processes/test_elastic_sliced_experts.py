"""A job whose layers have experts, in slices: it trains as one process does, through layouts with ep and without."""

from __future__ import annotations

from typing import Any

import pytest

import prophet
from pipeline_balance import elastic
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from tests.helpers import sliced_layers as own
from tests.helpers.elastic_experts import whole
from tests.helpers.elastic_jobs import same
from tests.helpers.launch import run_gloo
from tests.helpers.sliced_experts import layers

TOUR = (
    "pp2,dp2,ep2,slices4",
    "pp2,dp2,ep2",
    "pp4,slices6",
    "pp2,v2,dp2,ep2,zero1,slices4",
    "dp4,ep2,slices2",
    "pp2,dp2,slices4",
)


def _tour(rank: int, size: int, mode: Any) -> dict[str, Any]:
    updates = len(TOUR) + 1
    job = Job(
        lambda: layers(elastic.one_rank()),
        own.adam,
        Parallelism.parse(TOUR[0]),
        data=[own.batch(update, 0) for update in range(updates)],
        timeout_s=60.0,
        loss_fn=own.loss_fn,
        counted=own.counted,
        microbatches=own.PARTS,
        seed=own.SEED,
        balance_experts=prophet.EngineConfig(),
    )
    losses, kept = [job.step(max_norm=own.MAX_NORM)], []
    for number, text in enumerate(TOUR):
        if number:
            before = whole(job)
            job.switch(Parallelism.parse(text), mode=mode)
            kept.append(same(before, whole(job)))
        losses.append(job.step(max_norm=own.MAX_NORM))
    job.close()
    return {"losses": losses, "kept": kept}


@pytest.mark.parametrize("mode", ["safe", pytest.param("in-place", marks=pytest.mark.slow)])
def test_layers_of_experts_go_through_slices(mode: Any) -> None:
    slices: list[Any] = [Parallelism.parse(text).slices for text in (TOUR[0], *TOUR)]
    losses, _ = own.one_process(len(slices), slices, 1, layers(elastic.one_rank()))
    for result in run_gloo(_tour, 4, mode):
        assert result["losses"] == pytest.approx(losses, rel=1e-10)
        assert result["kept"] == [True] * (len(TOUR) - 1)
