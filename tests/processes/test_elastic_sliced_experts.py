"""A job whose layers have experts, in slices: it trains as one process does, through layouts with ep and without."""

from __future__ import annotations

from typing import Any

import pytest

import prophet
from pipeline_balance import elastic
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.slices import SliceOptions
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


def _tour(rank: int, size: int, mode: Any, share: float) -> dict[str, Any]:
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
        slices=SliceOptions(1, offload=share),
    )
    losses, kept = [job.step(max_norm=own.MAX_NORM)], []
    sent = job.pipeline.model.offloader.host.sent_bytes if share else 0  # type: ignore[attr-defined]
    for number, text in enumerate(TOUR):
        if number:
            before = whole(job)
            job.switch(Parallelism.parse(text), mode=mode)
            kept.append(same(before, whole(job)))
        losses.append(job.step(max_norm=own.MAX_NORM))
    job.close()
    return {"losses": losses, "kept": kept, "sent": sent}


@pytest.mark.parametrize(
    ("mode", "share"),
    [
        ("safe", 1.0),
        pytest.param("safe", 0.0, marks=pytest.mark.slow),
        pytest.param("in-place", 0.0, marks=pytest.mark.slow),
    ],
)
def test_layers_of_experts_go_through_slices(mode: Any, share: float) -> None:
    slices: list[Any] = [Parallelism.parse(text).slices for text in (TOUR[0], *TOUR)]
    losses, _ = own.one_process(len(slices), slices, 1, layers(elastic.one_rank()))
    for result in run_gloo(_tour, 4, mode, share):
        assert result["losses"] == pytest.approx(losses, rel=1e-10)
        assert result["kept"] == [True] * (len(TOUR) - 1)
        assert (result["sent"] > 0) == (share > 0)
