"""What users import from `pipeline_balance`, and from the doors below it."""

from __future__ import annotations

import importlib

import pytest

import pipeline_balance
from pipeline_balance.pipeline.stages import PipelineConfig
from pipeline_balance.pipeline.trainer import ElasticPipeline
from prophet.errors import SpecError


def test_the_package_offers_what_it_lists() -> None:
    assert pipeline_balance.ElasticPipeline is ElasticPipeline
    assert all(getattr(pipeline_balance, name).__name__ == name for name in pipeline_balance.__all__)
    with pytest.raises(AttributeError, match="Elastic"):
        _ = pipeline_balance.Elastic


@pytest.mark.parametrize(
    ("door", "name"),
    [
        ("runtime", "ElasticPipeline"),
        ("measure", "Meter"),
        ("controller", "ControllerConfig"),
        ("spec", "StageMap"),
        ("dynamics.gpt", "Block"),
        ("dynamics.freezing", "freeze_prefix"),
    ],
)
def test_documented_modules_stay(door: str, name: str) -> None:
    module = importlib.import_module(f"pipeline_balance.{door}")
    assert hasattr(module, name)
    assert all(hasattr(module, n) for n in getattr(module, "__all__", ()))
    if name == "ElasticPipeline":
        assert module.ElasticPipeline is ElasticPipeline


def test_a_pipeline_needs_microbatches() -> None:
    with pytest.raises(SpecError, match="microbatches must be at least 1, got 0"):
        PipelineConfig(microbatches=0)
