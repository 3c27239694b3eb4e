"""A job of a transformers model goes through layouts as the model trains in one process, packed and tied as well."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the model is transformers'")

from pipeline_balance import elastic
from tests.helpers.launch import run_gloo
from tests.helpers.releases import needs_orders
from tests.helpers.sliced_models import adam, batch_of, model_of, own_loss

KINDS = ("plain", "packed", "padded")
LAYOUTS = (elastic.Parallelism(pp=2), elastic.Parallelism(dp=2, zero=1), elastic.Parallelism(pp=2, order=(1, 0)))


def _train(rank: int, size: int, tied: bool, folder: str) -> list[float]:
    data = [batch_of(kind) for kind in KINDS]
    job = elastic.Job(lambda: model_of("llama", tied=tied), adam, LAYOUTS[0], data=data, microbatches=2, timeout_s=60.0)
    losses = [job.step(max_norm=0.5)]
    for layout in LAYOUTS[1:]:
        job.switch(layout)
        losses.append(job.step(max_norm=0.5))
    losses.append(job.evaluate(*batch_of("packed")))
    job.save_pretrained(folder)
    job.close()
    return losses


def _alone(tied: bool) -> list[float]:
    """`use_cache=False`: with a cache transformers does not see where packed documents begin."""
    model = model_of("llama", tied=tied)
    optimizer = adam(model.named_parameters())
    losses = []
    for kind in KINDS:
        inputs, labels = batch_of(kind)
        optimizer.zero_grad()
        loss = model(**inputs, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    inputs, labels = batch_of("packed")
    with torch.no_grad():
        losses.append(float(model(**inputs, labels=labels, use_cache=False).loss))
    return losses


@needs_orders
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_goes_through_layouts_and_trains_as_in_one_process(tied: bool, tmp_path: Path) -> None:
    losses = _alone(tied)
    for found in run_gloo(_train, 2, tied, str(tmp_path)):
        assert found == pytest.approx(losses, rel=1e-10)
    exported = type(model_of("llama")).from_pretrained(
        tmp_path, config=model_of("llama", tied=tied).config, dtype=torch.float64
    )
    exported.loss_function = own_loss
    inputs, labels = batch_of("packed")
    with torch.no_grad():
        loss = exported(**inputs, labels=labels, use_cache=False).loss
    assert float(loss) == pytest.approx(losses[-1], rel=1e-10)
