"""Jobs that go through layouts with and without slices, and what must hold after each switch."""

from __future__ import annotations

from typing import Any

from pipeline_balance import elastic
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from pipeline_balance.slices.parts import Sliced
from tests.helpers import sliced_layers as own
from tests.helpers.elastic_jobs import check_held, same, whole
from tests.helpers.sliced_models import MICROBATCHES, adam, batch_of, model_of


def own_job(layout: str, updates: int, **options: Any) -> Job:
    """Layers that attend, with dropout; every update has another batch."""
    given: dict[str, Any] = {"data": [own.batch(update, 0) for update in range(updates)], "timeout_s": 60.0}
    given |= {"loss_fn": own.loss_fn, "counted": own.counted, "microbatches": own.PARTS, "seed": own.SEED}
    return Job(own.layers, own.adam, Parallelism.parse(layout), **{**given, **options})


def llama_job(layout: str, kinds: list[str], **options: Any) -> Job:
    """A Llama in float64 with tied embeddings, trained on one batch of each kind in turn."""
    given: dict[str, Any] = {"data": [batch_of(kind) for kind in kinds], "microbatches": MICROBATCHES}
    given |= {"timeout_s": 60.0}
    return Job(lambda: model_of("llama", tied=True), adam, Parallelism.parse(layout), **{**given, **options})


def go(job: Job, text: str, max_norm: float, *, mode: Any = "safe", while_preparing: int = 0) -> list[float]:
    """Switch to a layout, with steps while it is prepared, whose losses are returned; everything is as it was then."""
    optimizer, modules, parameters = job.optimizer, list(job.model.modules()), list(job.model.parameters())
    left = job.pipeline.model
    layout = elastic.Parallelism.parse(text)
    job.prepare(layout)
    losses = [job.step(max_norm=max_norm) for _ in range(while_preparing)]
    before, position = whole(job), job.data.position
    job.switch(mode=mode)
    assert job.layout == layout
    assert same(whole(job), before)
    check_held(job)
    assert job.optimizer is optimizer
    assert all(a is b for a, b in zip(modules, job.model.modules(), strict=True))
    assert all(a is b for a, b in zip(parameters, job.model.parameters(), strict=True))
    assert job.data.position == position
    assert left is not job.pipeline.model or layout.slices == 1
    assert not chunks(left)
    assert not isinstance(left, Sliced) or left.store.n_bytes == 0  # it is in a reference cycle
    check_cut(job)
    return losses


def check_cut(job: Job) -> None:
    """The model is cut as the layout in force says, and no chunk is alive."""
    model, layout = job.pipeline.model, job.layout
    assert (model.slicing.slices if model.slicing is not None else 1) == layout.slices
    assert (model.slicing.stages_per_rank if model.slicing is not None else layout.v) == layout.v
    assert job.pipeline.builder.model is model
    assert not chunks(model)


def chunks(model: Any) -> int:
    """Chunks that nobody has freed."""
    return len(model.store) if isinstance(model, Sliced) else 0
