"""What a DeepSpeed engine with ZeRO holds, read off it, is what a layout with flat ranges says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipeline_balance import elastic
from pipeline_balance.elastic.layouts.boxes import MIXED_ADAMW, ModelDescription, Parameter, layout_of
from prophet.errors import SpecError
from tests.helpers.deepspeed_support import prepare
from tests.helpers.launch import run_gloo


def _build() -> nn.Sequential:
    """156 parameters: half of them end within a row of the first weight."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 12), nn.Linear(12, 5, bias=False))


def _engine(stage: int) -> Any:
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    model = _build()
    engine, *_ = prepare().initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def _held(rank: int, size: int, stage: int) -> None:
    engine = _engine(stage)
    engine.backward(engine(torch.ones(2, 7)).square().mean())
    engine.step()
    model = _build()
    parameters = tuple(
        Parameter(name=name, shape=tuple(p.shape), dtype="float32", layers=(int(name[0]),))
        for name, p in model.named_parameters()
    )
    described = ModelDescription(name="small", layers=2, parameters=parameters, entries=MIXED_ADAMW)
    layout = layout_of(described, elastic.Parallelism(dp=size, zero=1), ranks=size, flat=True)
    mine = set(layout.on(rank))
    assert {box for name, box in mine if name == "0.weight@exp_avg"}
    assert set(elastic.held(engine.module, engine.optimizer)) == mine


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_an_engine_holds_is_what_a_layout_of_flat_ranges_says(stage: int) -> None:
    run_gloo(_held, 2, stage, timeout_s=100.0)


def test_zero_3_is_refused_by_name() -> None:
    model: Any = _build()
    model[0].weight.ds_id = 0  # DeepSpeed's mark of such a parameter
    with pytest.raises(SpecError, match=r"0\.weight is partitioned by DeepSpeed's ZeRO 3"):
        elastic.held(model)
