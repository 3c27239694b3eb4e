"""One run of everything that a job does: stages follow freezing, dp, slices and ep change, experts are balanced.

The model is a transformers Mixtral; what it is held to is its own loop in one process, unconverted.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="the model is transformers'")

import prophet
from pipeline_balance import ControllerConfig, elastic
from pipeline_balance.control.decide import MoveCost
from pipeline_balance.elastic.job import Job
from pipeline_balance.elastic.layouts.parallelism import Parallelism
from tests.helpers.elastic_experts import whole
from tests.helpers.elastic_jobs import same
from tests.helpers.launch import run_gloo
from tests.helpers.sliced_models import adam, batch_of, model_of, own_loss
from tests.helpers.support import FixedPlanner, everywhere

LAYERS, MICROBATCHES, ROWS = 6, 4, 8
FREEZES_AT, FROZEN, STEPS = 3, 3, 18
PATIENCE = 12  # more steps that a move may take where other work disturbs what is measured
BACKWARD_S = 10e-3
EXACT = 1e-10


def _model() -> Any:
    model = model_of("mixtral", num_hidden_layers=LAYERS, output_router_logits=False)
    for layer in model.model.layers:
        layer.register_forward_hook(_slow_backward)
    return model


def _slow_backward(layer: nn.Module, args: Any, out: Any) -> None:
    """A layer's backward takes a known time, unless it is below all that trains."""
    hidden: Tensor = out[0] if isinstance(out, tuple) else out
    if hidden.requires_grad:
        hidden.register_hook(lambda grad: time.sleep(BACKWARD_S))


def _converted() -> Any:
    model = _model()
    prophet.convert(model, group=elastic.one_rank())
    return model


def _batches() -> list[Any]:
    return [batch_of(rows=ROWS, seed=step) for step in range(STEPS + PATIENCE)]


def _freeze(model: Any) -> None:
    model.get_input_embeddings().requires_grad_(False)
    for layer in list(model.model.layers)[:FROZEN]:
        layer.requires_grad_(False)


def _alone() -> list[float]:
    model = model_of("mixtral", num_hidden_layers=LAYERS, output_router_logits=False)
    optimizer, losses = adam(list(model.named_parameters())), []
    for step, (inputs, labels) in enumerate(_batches()):
        if step == FREEZES_AT:
            _freeze(model)
        optimizer.zero_grad()
        loss = model(**inputs, labels=labels, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _job(layout: str, **options: Any) -> Job:
    stages = ControllerConfig(
        every_steps=2, measure_steps=2, min_gain=0.1, horizon_steps=40, move_cost=MoveCost(fixed_s=0.0)
    )
    experts = prophet.EngineConfig(planner=FixedPlanner(everywhere(4, 2)), slots_per_rank=4)  # type: ignore[arg-type]
    given: dict[str, Any] = {"microbatches": MICROBATCHES, "timeout_s": 60.0}
    given |= {"balance_stages": stages, "balance_experts": experts}
    return Job(_converted, adam, Parallelism.parse(layout), data=_batches(), **{**given, **options})


def _run(rank: int, size: int, folder: str) -> dict[str, Any]:
    job = _job("pp2,dp2")
    losses, layouts, kept, copies = [], [], [], 0

    def steps(count: int) -> None:
        nonlocal copies
        for _ in range(count):
            if len(losses) == FREEZES_AT:
                _freeze(job.model)
            losses.append(job.step(max_norm=0.5))
            layouts.append(str(job.layout))
            if job.engine is not None:
                copies += int(job.engine.last_step.copies.sum())

    steps(8)
    while "stages" not in layouts[-1] and len(losses) < 8 + PATIENCE:
        steps(2)
    moved = len(losses)
    for layout in ("pp4", "pp2,dp2,slices4", "pp2,dp2,ep2,slices2"):
        before = whole(job)
        job.switch(Parallelism.parse(layout))
        kept.append(same(before, whole(job)))
        steps(2)
    job.save(folder)
    before = whole(job)
    job.close()
    job = _job("dp4,ep2")
    job.load(folder)
    kept.append(same(before, whole(job)))
    steps(STEPS + moved - 8 - len(losses))
    job.save_pretrained(f"{folder}/pretrained")
    exported = job.evaluate(*_batches()[0])
    job.close()
    return {"exported": exported, "losses": losses, "layouts": layouts, "kept": kept, "copies": copies, "moved": moved}


def test_one_run_of_all_is_equal_to_one_process(tmp_path: Path) -> None:
    losses = _alone()
    results = run_gloo(_run, 4, str(tmp_path), timeout_s=240.0)
    layouts, moved = results[0]["layouts"], results[0]["moved"]
    assert all(r["layouts"] == layouts for r in results)
    assert results[0]["losses"] == pytest.approx(losses[: len(results[0]["losses"])], rel=EXACT)
    assert all(r["losses"] == results[0]["losses"] for r in results)
    assert all(r["kept"] == [True] * 4 for r in results)
    exported = type(model_of("mixtral")).from_pretrained(
        tmp_path / "pretrained", config=_model().config, dtype=torch.float64
    )
    exported.set_experts_implementation("eager")
    exported.loss_function = own_loss
    inputs, labels = _batches()[0]
    with torch.no_grad():
        loss = exported(**inputs, labels=labels, use_cache=False).loss
    assert float(loss) == pytest.approx(results[0]["exported"], rel=EXACT)
    assert sum(r["copies"] for r in results) > 0
    # once layers are frozen, the first stage has more of them
    assert layouts[0] == "pp2,dp2"
    maps = [text.removeprefix("pp2,dp2,stages").split(":") for text in layouts[FREEZES_AT:moved] if "stages" in text]
    assert any(int(first) > int(second) for first, second in maps), layouts
    assert layouts[moved].startswith("pp4,stages")
